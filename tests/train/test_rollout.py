"""One batch of experience: prompts, completions, and what the models say of them."""

import math

import pytest
import torch
from trainer_parts import load, nudge, one_batch, precise, step_by_step, tiny_run

from helpers import assert_close
from klamp.errors import DataError
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ValueLoss
from klamp.objective.objective import Objective
from klamp.train import rollout
from klamp.train.models import distribution_of, forward, values_of
from klamp.train.rollout import Observed
from klamp.train.sampler import Decoding
from klamp.train.states import head_of
from klamp.train.tasks.task import Example

EXAMPLES = tuple(Example(prompt=p) for p in ("s394571=", "s21=", "r8123="))
HOW = Decoding(max_new_tokens=8)
FULL = Objective(kl=KLTerm(estimator="exact"), value_loss=ValueLoss())


@pytest.fixture(scope="module")
def models():
    """A policy that has moved from its reference, with a value function that says something."""
    torch.manual_seed(0)
    found = precise(load(FULL))
    nudge(found.policy)
    torch.nn.init.normal_(found.value.head.weight)
    return found


@pytest.fixture(scope="module")
def samples(models):
    generator = torch.Generator().manual_seed(2)
    return rollout.sample(models, EXAMPLES, HOW, samples_per_prompt=3, generator=generator)


def observed(models, samples, objective=FULL, temperature=0.8, micro_tokens=10_000):
    return rollout.observe(
        models, objective, samples.tokens, temperature=temperature, micro_tokens=micro_tokens
    )


def test_every_row_is_a_completion_of_its_own_examples_prompt(models, samples):
    tokens = samples.tokens
    assert samples.examples == tuple(e for e in EXAMPLES for _ in range(3))
    assert samples.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for row, example in enumerate(samples.examples):
        ids = tokens.prompts[row][tokens.prompt_mask[row]]
        assert models.tokenizer.decode(ids) == example.prompt


def test_a_text_is_the_response_without_its_end(models, samples):
    tokens = samples.tokens
    for row, text in enumerate(samples.texts):
        response = tokens.responses[row][tokens.mask[row]]
        without = response[: len(response) - (not samples.truncated[row])]
        assert text == models.tokenizer.decode(without)
        assert "<" not in text
    assert len(set(samples.texts)) > 3
    assert not samples.truncated.all()


def test_a_padding_token_that_stands_for_the_end_is_not_read_as_text(samples, models):
    # What lies behind a response is padding, whatever its id: it never reaches the text.
    generator = torch.Generator().manual_seed(2)
    pad, models.tokenizer.pad_token = models.tokenizer.pad_token, models.tokenizer.eos_token
    try:
        other = rollout.sample(models, EXAMPLES, HOW, samples_per_prompt=3, generator=generator)
    finally:
        models.tokenizer.pad_token = pad
    assert other.texts == samples.texts


def test_a_prompt_without_tokens_is_refused_by_name(models):
    with pytest.raises(DataError, match=r"the prompt '' has no tokens; remove it"):
        rollout.prompt_ids(models, [EXAMPLES[0], Example(prompt="")])


@pytest.mark.parametrize("micro_tokens", [1, 40])
def test_how_rows_are_cut_into_passes_does_not_matter(models, samples, micro_tokens):
    whole, cut = observed(models, samples), observed(models, samples, micro_tokens=micro_tokens)
    mask = samples.tokens.mask
    for name, x in vars(whole).items():
        assert_close(getattr(cut, name)[mask], x[mask], msg=name)


def test_old_reference_and_values_are_what_each_network_says(models, samples):
    found, mask = observed(models, samples), samples.tokens.mask
    with torch.no_grad():
        policy = forward(models, models.policy, samples.tokens, 0.8)
        reference = forward(models, models.reference, samples.tokens, 0.8)
        values = values_of(models, samples.tokens, policy.reading)
    assert_close(found.old_logprobs[mask], policy.logprobs[mask])
    assert_close(found.ref_logprobs[mask], reference.logprobs[mask])
    assert_close(found.values[mask], values[mask])
    assert (found.old_logprobs - found.ref_logprobs)[mask].abs().max() > 0.1


def test_the_exact_kl_is_the_sum_over_the_whole_vocabulary(models, samples):
    found = observed(models, samples).exact_kl
    tokens = samples.tokens
    for row in (0, 4, 8):
        prompt = tokens.prompts[row][tokens.prompt_mask[row]].tolist()
        response = tokens.responses[row][tokens.mask[row]].tolist()
        p, q = (step_by_step(n, prompt, response, 0.8) for n in (models.policy, models.reference))
        assert_close(found[row, : len(response)].double(), (p.exp() * (p - q)).sum(-1))
        assert found[row, : len(response)].max() > 0.01


@pytest.mark.parametrize(
    ("objective", "kinds"),
    [
        (Objective(), {"reference": "none"}),
        (Objective(), {"reference": "copy"}),
        (Objective(kl=KLTerm()), {}),
        (Objective(value_loss=ValueLoss()), {}),
    ],
    ids=["nothing", "a reference to watch", "a KL", "a value loss"],
)
def test_what_nobody_needs_is_not_observed(samples, objective, kinds):
    found = observed(load(objective, **kinds), samples, objective)
    has_reference = objective.kl is not None or kinds.get("reference") == "copy"
    assert (found.ref_logprobs is not None) == has_reference
    assert (found.values is not None) == (objective.value_loss is not None)
    assert found.exact_kl is None
    assert not found.old_logprobs.requires_grad


def seen(samples):
    zeros = torch.zeros(samples.tokens.mask.shape)
    return Observed(
        old_logprobs=zeros, ref_logprobs=zeros - 1, values=zeros + 2, exact_kl=zeros + 3
    )


def test_a_batch_is_what_was_observed_and_nothing_else(samples):
    scores = [0.0, 1.0, math.nan, 0.5, 1.0, 0.0, 0.25, 1.0, 0.0]
    batch, found = rollout.batch(samples, seen(samples), scores), seen(samples)
    torch.testing.assert_close(batch.scores, torch.tensor(scores), equal_nan=True)
    assert batch.mask is samples.tokens.mask
    assert batch.groups is samples.groups
    assert batch.sampler_logprobs is samples.sampler_logprobs
    assert batch.truncated is samples.truncated
    for name, x in vars(found).items():
        assert torch.equal(getattr(batch, name), x)
    assert batch.difficulty is None


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        ([1, 2.5, 0], [1.0, 1.0, 1.0, 2.5, 2.5, 2.5, 0.0, 0.0, 0.0]),
        ([1, None, 0], None),
        (["hard", 1, 2], None),
    ],
    ids=str,
)
def test_difficulty_is_a_column_of_the_examples_where_all_have_it(models, column, wanted):
    examples = [
        Example(prompt=e.prompt, columns={"difficulty": d})
        for e, d in zip(EXAMPLES, column, strict=True)
    ]
    made = rollout.sample(models, examples, HOW, samples_per_prompt=3)
    found = rollout.batch(made, seen(made), [0.0] * 9).difficulty
    assert (None if found is None else found.tolist()) == wanted


@pytest.mark.parametrize("gradient", ["value", "token", "sequence"])
def test_a_loss_of_the_exact_kl_takes_that_of_the_policy_as_it_now_is(tmp_path, gradient):
    exact = ("objective.kl.estimator=exact", f"objective.kl.gradient={gradient}")
    run = tiny_run(tmp_path, *exact)
    precise(run.models)
    samples, batch, targets, _ = one_batch(run)
    assert not batch.exact_kl.any()
    nudge(run.models.policy, 0.05)
    with torch.no_grad(), run.models.as_reference() as reference:
        p = distribution_of(
            forward(run.models, run.models.policy, samples.tokens, 1.0).reading, 1.0
        ).double()
        q = distribution_of(
            forward(run.models, reference, samples.tokens, 1.0).reading, 1.0
        ).double()
    now = (p.exp() * (p - q)).sum(-1)[batch.mask].mean()
    assert now > 0.05
    metrics, problem = run.learner.update(
        samples.tokens, batch, targets, torch.arange(len(batch.mask))
    )
    assert problem is None
    assert metrics["actor/kl"] == pytest.approx(float(now), rel=1e-5)


class Passes:
    """How often a network's head is asked."""

    def __init__(self, network):
        self.count = 0
        head_of(network).register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.count += 1


@pytest.mark.parametrize(
    ("objective", "settings", "asked"),
    [
        (Objective(), {}, False),
        (Objective(kl=KLTerm()), {}, False),
        (Objective(value_loss=ValueLoss()), {"value": "own"}, False),
        (Objective(value_loss=ValueLoss()), {"value": "shared"}, True),
        (Objective(kl=KLTerm(estimator="exact")), {}, True),
    ],
    ids=["nothing", "a KL", "values of its own", "shared values", "exact KL"],
)
def test_the_policy_is_asked_again_only_where_more_than_log_probs_is_needed(
    objective, settings, asked
):
    models = precise(load(objective, **settings))
    made = rollout.sample(models, EXAMPLES, HOW, samples_per_prompt=3)
    how = {"temperature": 1.0, "micro_tokens": 10_000}
    plain = rollout.observe(models, objective, made.tokens, **how)
    passes = Passes(models.policy)
    found = rollout.observe(models, objective, made.tokens, **how, known=made.sampler_logprobs)
    assert (passes.count > 0) == asked
    mask = made.tokens.mask
    for name, x in vars(plain).items():
        if x is None:
            assert getattr(found, name) is None
        else:
            assert_close(getattr(found, name)[mask], x[mask], msg=name)
    assert (found.old_logprobs is made.sampler_logprobs) == (not asked)


@pytest.mark.parametrize(
    ("decoding", "precision", "wanted"),
    [
        ({}, "float32", True),
        ({"temperature": 0.7}, "float32", True),
        ({"top_p": 1.0}, "float32", True),
        ({"top_p": 0.9}, "float32", False),
        ({"top_k": 5}, "float32", False),
        ({"greedy": True}, "float32", False),
        ({}, "bfloat16", False),
    ],
    ids=str,
)
def test_the_samplers_log_probs_are_taken_where_it_samples_what_is_trained(
    decoding, precision, wanted
):
    models = load(precision=precision)
    assert rollout.as_trained(models, Decoding(max_new_tokens=2, **decoding)) == wanted


def test_samples_of_one_prompt_are_known_to_share_it(models, samples):
    assert samples.tokens.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
