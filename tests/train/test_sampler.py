"""Sampling: the log-probs it records, what it may draw, where responses end."""

import pytest
import torch
from trainer_parts import load, model_directory, nudge, precise

from helpers import assert_close
from klamp.errors import NumericsError
from klamp.train import reader, sampler
from klamp.train.models import distribution_of, forward, read
from klamp.train.sampler import Decoding, choose, drawn, generate, narrowed
from klamp.train.states import head_of, trunk_of
from klamp.train.tokens import Tokens, padded_left

END, PAD = 1, 0
NAN, INF = float("nan"), float("inf")
LIMIT = 10


@pytest.fixture(scope="module")
def models():
    return precise(load())


@pytest.fixture(scope="module", params=["builtin", "gpt2", "qwen2", "gemma"])
def each(request, tmp_path_factory):
    """Networks of four kinds in float64, whose responses end at different places."""
    if request.param == "builtin":
        return precise(load())
    place = tmp_path_factory.mktemp(request.param)
    found = precise(load(path=model_directory(place, request.param)))
    untrained, _ = generated(found, greedy=True)  # what it writes is as good an end as any
    found.policy.generation_config.eos_token_id = untrained.responses[[0, 1, 2], [2, 4, 6]].tolist()
    return found


def prompts_of(models, *texts):
    return padded_left([models.tokenizer(t)["input_ids"] for t in texts], PAD)


TEXTS = ("s394571=", "s21=", "r8123=", "a37+48=", "s9876=", "s5050505050=")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def generated(models, *texts, samples=1, seed=0, **decoding):
    ids, mask = prompts_of(models, *(texts or TEXTS))
    how = Decoding(**({"max_new_tokens": LIMIT} | decoding))
    out = generate(models, ids, mask, how, samples_per_prompt=samples, generator=rng(seed))
    return out, Tokens(
        prompts=ids.repeat_interleave(samples, 0),
        prompt_mask=mask.repeat_interleave(samples, 0),
        responses=out.responses,
        mask=out.mask,
    )


def said(out):
    """Each response as a list of ids."""
    return [r[m].tolist() for r, m in zip(out.responses, out.mask, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probs_are_the_policys_own(each, temperature):
    out, tokens = generated(each, samples=4, temperature=temperature)
    with torch.no_grad():
        own = forward(each, each.policy, tokens, temperature).logprobs
    assert_close(out.logprobs[out.mask], own[out.mask])
    assert not out.logprobs[~out.mask].any()


NARROW = [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8}, {"top_k": 1}, {"top_p": 1e-9}]


def kept(distribution, top_k=None, top_p=None):
    """The tokens that may be drawn, one by one: the likeliest k, until their sum reaches p."""
    order = distribution.argsort(descending=True).tolist()[:top_k]
    whole = float(distribution[order].exp().sum())
    inside, sum_so_far = [], 0.0
    for token in order:
        if top_p is None or sum_so_far < top_p:
            inside.append(token)
        sum_so_far += float(distribution[token].exp()) / whole
    return inside


@pytest.mark.parametrize("limits", NARROW, ids=str)
def test_narrowed_sampling_records_renormalised_log_probs_and_draws_nothing_else(models, limits):
    out, tokens = generated(models, samples=6, temperature=1.3, **limits)
    with torch.no_grad():
        full = distribution_of(read(models, models.policy, tokens), 1.3).double()
    for row, t in out.mask.nonzero().tolist():
        inside = kept(full[row, t], **limits)
        token = int(out.responses[row, t])
        assert token in inside
        wanted = full[row, t, token] - full[row, t, inside].logsumexp(0)
        assert_close(out.logprobs[row, t].double(), wanted)


def test_narrowing_keeps_the_smallest_set_that_reaches_the_share():
    # 0.5, 0.3, 0.15, 0.05: with 0.8 the first two reach it; with 0.81 three are needed.
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    for share, inside in [(0.4, {1}), (0.79, {1, 3}), (0.81, {0, 1, 3}), (0.96, {0, 1, 2, 3})]:
        left = narrowed(logits, Decoding(max_new_tokens=1, top_p=share)).isfinite()
        assert set(left[0].nonzero().flatten().tolist()) == inside
    # After the first two of top-k, 0.5 is 62.5 % of what is left.
    both = narrowed(logits, Decoding(max_new_tokens=1, top_k=2, top_p=0.6)).isfinite()
    assert both.tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("limits", [{"top_k": 500}, {"top_p": 1.0}, {}], ids=str)
def test_limits_that_leave_everything_change_nothing(limits):
    logits = torch.randn(3, 8)
    assert torch.equal(narrowed(logits, Decoding(max_new_tokens=1, **limits)), logits)


def test_greedy_is_what_transformers_generates_itself(each):
    models = each
    ids, mask = prompts_of(models, *TEXTS)
    theirs = models.policy.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        do_sample=False,
        max_new_tokens=LIMIT,
        pad_token_id=PAD,
        eos_token_id=models.stops(),
    )[:, ids.shape[1] :]
    out, _ = generated(models, greedy=True)
    assert torch.equal(torch.where(out.mask, out.responses, PAD), theirs)
    assert len({len(r) for r in said(out)}) > 1  # rows did end at different places


def test_greedy_records_the_log_prob_of_the_likeliest_token(models):
    out, tokens = generated(models, greedy=True, temperature=0.5)
    with torch.no_grad():
        full = distribution_of(read(models, models.policy, tokens), 1.0)
    top = full.max(dim=-1)
    assert torch.equal(top.indices[out.mask], out.responses[out.mask])
    assert_close(out.logprobs[out.mask], top.values[out.mask])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_first_tokens_are_drawn_as_often_as_they_are_likely(models, temperature):
    samples = 6000
    out, tokens = generated(
        models, "s394571=", samples=samples, max_new_tokens=1, temperature=temperature
    )
    with torch.no_grad():
        part = tokens.select(torch.tensor([0]))
        likely = distribution_of(
            forward(models, models.policy, part, temperature).reading, temperature
        )[0, 0].exp()
    wanted = samples * likely.double()
    found = torch.bincount(out.responses[:, 0], minlength=len(likely)).double()
    common = wanted >= 5
    pairs = [(found[common], wanted[common])]
    if wanted[~common].sum() > 1:
        pairs.append((found[~common].sum()[None], wanted[~common].sum()[None]))
    distance = sum(float(((f - w) ** 2 / w).sum()) for f, w in pairs)
    freedom = int(common.sum()) - 1 + len(pairs) - 1
    assert freedom >= 3
    assert distance < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations of χ²


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_dropping_rows_that_have_ended_does_not_touch_the_others(each, monkeypatch, share):
    usual, _ = generated(each, greedy=True)
    monkeypatch.setattr(sampler, "KEPT_FULL", share)
    other, _ = generated(each, greedy=True)
    assert said(other) == said(usual)
    assert torch.equal(other.truncated, usual.truncated)
    assert_close(other.logprobs, usual.logprobs)


def test_rows_that_have_ended_stop_costing(each):
    models, seen = each, []
    hook = head_of(models.policy).register_forward_pre_hook(
        lambda module, args: seen.append(len(args[0]))
    )
    try:
        out, _ = generated(models, greedy=True)
    finally:
        hook.remove()
    lengths = out.mask.sum(dim=1)
    going = [int((lengths > t).sum()) for t in range(int(lengths.max()))]
    assert going[-1] < going[0] and seen[0] == going[0] and seen[-1] < going[0]
    assert all(
        rows * sampler.KEPT_FULL <= left <= rows for rows, left in zip(seen, going, strict=True)
    )


def test_a_response_ends_with_the_end_which_counts_or_is_truncated(models):
    out, _ = generated(models, samples=8, max_new_tokens=6)
    assert out.truncated.any() and not out.truncated.all()
    for response, cut in zip(said(out), out.truncated.tolist(), strict=True):
        assert END not in response[:-1]
        assert (response[-1] == END) == (not cut)
        assert len(response) == 6 if cut else len(response) <= 6
    lengths = out.mask.sum(dim=1, keepdim=True)
    assert torch.equal(out.mask, torch.arange(out.mask.shape[1]) < lengths)
    assert (out.responses[~out.mask] == PAD).all()


def test_an_end_at_the_very_last_position_is_no_truncation(models):
    free, _ = generated(models, "s394571=", greedy=True)
    (response,) = said(free)
    assert response[-1] == END
    just, _ = generated(models, "s394571=", greedy=True, max_new_tokens=len(response))
    short, _ = generated(models, "s394571=", greedy=True, max_new_tokens=len(response) - 1)
    assert said(just) == [response] and just.truncated.tolist() == [False]
    assert said(short) == [response[:-1]] and short.truncated.tolist() == [True]


def test_responses_are_as_wide_as_the_longest(models):
    out, _ = generated(models, greedy=True, max_new_tokens=40)
    assert out.responses.shape == out.logprobs.shape == out.mask.shape
    assert out.mask.shape[1] == int(out.mask.sum(dim=1).max()) < 40


def test_any_of_several_ends_will_do():
    models = load()
    first, _ = generated(models, "s394571=", greedy=True)
    four = models.tokenizer("4")["input_ids"]
    models.policy.generation_config.eos_token_id = [END, *four]
    out, _ = generated(models, "s394571=", greedy=True)
    at = said(first)[0].index(four[0])
    assert said(out) == [said(first)[0][: at + 1]]
    assert not out.truncated.any()


def test_samples_of_one_prompt_stand_beside_each_other(models):
    one, _ = generated(models, greedy=True)
    three, _ = generated(models, greedy=True, samples=3)
    assert said(three) == [r for r in said(one) for _ in range(3)]


def test_a_prompt_is_read_once_for_all_its_samples(each, monkeypatch):
    monkeypatch.setattr(reader, "fits", lambda trunk: False)
    models, seen = each, []
    hook = trunk_of(models.policy).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        generated(models, "s394571=", "s12=", samples=5)
    finally:
        hook.remove()
    assert seen[:2] == [(2, 8), (10, 1)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_a_row_draws_does_not_depend_on_when_others_are_dropped(each, monkeypatch, share):
    usual, _ = generated(each, samples=3, temperature=1.3)
    monkeypatch.setattr(sampler, "KEPT_FULL", share)
    other, _ = generated(each, samples=3, temperature=1.3)
    assert said(other) == said(usual)
    assert_close(other.logprobs, usual.logprobs)


def test_looking_less_often_at_who_has_ended_changes_nothing(each, monkeypatch):
    usual, _ = generated(each, samples=3)
    monkeypatch.setattr(sampler, "LOOKS", {})
    other, _ = generated(each, samples=3)
    assert said(other) == said(usual)
    assert torch.equal(other.truncated, usual.truncated)


def test_what_was_sampled_can_be_learnt_from(models):
    out, _ = generated(models)
    assert not any(x.is_inference() for x in vars(out).values())


@pytest.mark.parametrize("luck", [0.0, 1.0 - 2.0**-20])
def test_at_the_ends_of_luck_only_tokens_that_can_be_are_drawn(luck):
    logits = torch.tensor([[-INF, 0.3, 0.1, -INF], [-INF, -INF, 7.0, -INF]])
    luck = torch.full((2,), luck, dtype=torch.float64)
    tokens, logprobs = drawn(logits, Decoding(max_new_tokens=1), luck)
    assert tokens.tolist() == ([1, 2] if luck[0] == 0 else [2, 2])
    assert logprobs.isfinite().all()


def test_prompts_of_unequal_length_are_answered_as_each_alone(each):
    models = each
    together, _ = generated(models, greedy=True)
    alone = [generated(models, text, greedy=True)[0] for text in TEXTS]
    assert said(together) == [said(out)[0] for out in alone]
    assert together.truncated.tolist() == [bool(out.truncated) for out in alone]
    for row, out in enumerate(alone):
        assert_close(together.logprobs[row, : out.mask.shape[1]], out.logprobs[0])


def test_the_same_seed_draws_the_same_and_another_seed_something_else(models):
    one, again, other = (said(generated(models, samples=4, seed=s)[0]) for s in (3, 3, 4))
    assert one == again != other


def test_without_a_generator_the_global_one_is_drawn_from(models):
    ids, mask = prompts_of(models, *TEXTS)
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(said(generate(models, ids, mask, Decoding(max_new_tokens=LIMIT))))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("greedy", [True, False])
def test_weights_that_are_not_numbers_are_named(greedy):
    models = load()
    with torch.no_grad():
        models.policy.model.norm.weight[3] = torch.nan
    with pytest.raises(NumericsError, match=r"logits are not finite in row 0 of the sampler"):
        generated(models, greedy=greedy)


@pytest.mark.parametrize(
    "bad",
    [
        [NAN, 0.0, 1.0],
        [-INF, -INF, -INF],
        [INF, 0.0, 1.0],
    ],
    ids=str,
)
def test_logits_that_make_no_distribution_are_refused_with_their_row(bad):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad, bad])
    with pytest.raises(NumericsError, match=r"in row 1 of the sampler.*lower optimizer\.lr"):
        choose(logits, Decoding(max_new_tokens=1), rng())


def test_a_token_that_the_model_rules_out_is_no_error():
    logits = torch.tensor([[-INF, 0.0, -INF]])
    token, logprob = choose(logits, Decoding(max_new_tokens=1), rng())
    assert token.tolist() == [1] and logprob.tolist() == [0.0]


def test_an_adapter_is_sampled_with_what_it_has_learnt():
    plain, adapted = precise(load()), precise(load(lora={"rank": 4}))
    assert said(generated(adapted, greedy=True)[0]) == said(generated(plain, greedy=True)[0])
    nudge(adapted.policy, 0.3)
    out, tokens = generated(adapted, samples=2)
    with torch.no_grad():
        own = forward(adapted, adapted.policy, tokens, 1.0).logprobs
    assert_close(out.logprobs[out.mask], own[out.mask])
