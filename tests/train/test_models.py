"""The networks at work: the shift, padding, temperature, values, and where gradients go."""

import pytest
import torch
from trainer_parts import (
    PROMPTS,
    RESPONSES,
    chosen,
    gradients,
    load,
    model_directory,
    nudge,
    precise,
    sequences,
    step_by_step,
    uneven,
)

from helpers import assert_close
from klamp.errors import ConfigError
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ValueLoss
from klamp.objective.objective import Objective
from klamp.train.models import autocast_of, device_of, distribution_of, forward, values_of
from klamp.train.states import attention

KINDS = ["builtin", "gpt2", "qwen2", "gemma"]
ROWS = range(len(PROMPTS))
VALUED = Objective(value_loss=ValueLoss())


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    places = {k: tmp_path_factory.mktemp(k) for k in KINDS[1:]}
    return {"builtin": "builtin"} | {k: model_directory(p, k) for k, p in places.items()}


def policy(path):
    return precise(load(path=path))


def spoken(models, tokens, temperature=1.0):
    with torch.no_grad():
        return forward(models, models.policy, tokens, temperature)


def active(x, mask):
    return [row[m] for row, m in zip(x, mask, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_each_log_prob_is_that_of_the_token_given_what_stands_before_it(paths, kind, temperature):
    models = policy(paths[kind])
    out = spoken(models, uneven(), temperature)
    for row in ROWS:
        plain = step_by_step(models.policy, PROMPTS[row], RESPONSES[row], temperature)
        length = len(RESPONSES[row])
        assert_close(out.logprobs[row, :length].double(), chosen(plain, RESPONSES[row]))
        assert_close(distribution_of(out.reading, temperature)[row, :length].double(), plain)
        assert_close(out.entropy[row, :length].double(), -(plain.exp() * plain).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("left", "right", "junk"), [(0, 0, 0), (3, 0, 0), (0, 4, 0), (2, 5, 17)], ids=str
)
def test_padding_and_what_stands_in_it_do_not_matter(paths, kind, left, right, junk):
    models, tokens = policy(paths[kind]), uneven()
    padded = sequences(PROMPTS, RESPONSES, left=left, right=right, junk=junk)
    one, other = spoken(models, tokens), spoken(models, padded)
    for a, b in zip(
        active(one.logprobs, tokens.mask), active(other.logprobs, padded.mask), strict=True
    ):
        assert_close(a, b)


def test_nothing_is_said_of_padding_where_there_is_none_on_the_left():
    assert attention(torch.tensor([[True, True], [True, False]])) == {
        "attention_mask": None,
        "position_ids": None,
    }


def test_positions_are_counted_from_the_first_token_that_is_there():
    given = attention(
        torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
    )
    assert given["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert given["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]


def weighted_gradients(models, parts):
    """The gradient of a sum of weighted log-probs, entropies and values, pass by pass."""
    models.policy.zero_grad()
    everyone = uneven()
    weight = torch.linspace(-1.0, 2.0, everyone.mask.numel()).view_as(everyone.mask)
    for rows in parts:
        part = everyone.select(torch.tensor(rows))
        out = forward(models, models.policy, part, 0.9, entropy_grad=True)
        w = torch.where(part.mask, weight[rows, : part.mask.shape[1]], 0.0)
        total = (w * out.logprobs).sum() + (w * out.entropy).sum()
        if models.value is not None:
            total = total + (w * values_of(models, part, out.reading)).sum()
        total.backward()
    return gradients(models.policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[2, 0], [1]], [[1, 2, 0]]], ids=str)
def test_order_and_cuts_into_passes_do_not_change_the_gradient(paths, kind, parts):
    models = policy(paths[kind])
    whole, cut = weighted_gradients(models, [[0, 1, 2]]), weighted_gradients(models, parts)
    for name, gradient in whole.items():
        assert_close(cut[name], gradient, msg=name)
    assert any(g.abs().sum() > 0 for g in whole.values())


@pytest.mark.parametrize("wanted", [True, False])
def test_the_entropy_has_a_gradient_only_where_it_is_asked_for(wanted):
    models = load()
    out = forward(models, models.policy, uneven(), 1.0, entropy_grad=wanted)
    assert out.entropy.requires_grad == wanted
    assert out.logprobs.requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_values_are_read_where_the_token_is_chosen(paths, kind, trunk):
    models = precise(load(VALUED, path=paths[kind], value=trunk))
    torch.nn.init.normal_(models.value.head.weight)
    torch.nn.init.constant_(models.value.head.bias, 0.25)
    if trunk == "own":
        nudge(models.value.trunk)
    network = models.policy.base_model if trunk == "shared" else models.value.trunk
    tokens = uneven()
    with torch.no_grad():
        values = values_of(models, tokens, forward(models, models.policy, tokens, 1.0).reading)
        for row in ROWS:
            for t in range(len(RESPONSES[row])):
                seen = torch.tensor([[*PROMPTS[row], *RESPONSES[row][:t]]])
                last = network(input_ids=seen).last_hidden_state[0, -1].float()
                assert_close(values[row, t], models.value.head(last).squeeze())


def test_a_fresh_value_function_says_zero():
    models = load(VALUED)
    tokens = uneven()
    assert not values_of(models, tokens, spoken(models, tokens).reading).any()


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_the_values_gradient_reaches_its_own_trunk_or_the_policys(trunk):
    models = load(VALUED, value=trunk)
    torch.nn.init.normal_(models.value.head.weight)
    tokens = uneven()
    values_of(models, tokens, forward(models, models.policy, tokens, 1.0).reading).sum().backward()
    in_policy = any(g is not None for g in gradients(models.policy).values())
    in_own = [g is not None for n, g in gradients(models.value).items() if n.startswith("trunk")]
    assert in_policy == (trunk == "shared")
    assert in_own == ([] if trunk == "shared" else [True] * len(in_own))
    assert bool(in_own) == (trunk == "own")


def test_the_reference_is_asked_without_a_gradient():
    models = load(Objective(kl=KLTerm()))
    with models.as_reference() as reference:
        out = forward(models, reference, uneven(), 1.0, entropy_grad=True)
    assert not out.logprobs.requires_grad and not out.entropy.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_dropout_in_a_models_config_has_no_effect_even_in_training_mode(tmp_path, kind):
    rates = {
        "gpt2": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
        "qwen2": {"attention_dropout": 0.5},
    }[kind]
    models = load(path=model_directory(tmp_path, kind, **rates))
    calm = spoken(models, uneven())
    models.policy.train()
    assert_close(spoken(models, uneven()).logprobs, calm.logprobs)


def test_autocast_computes_in_bfloat16_and_hands_out_float32():
    plain, cast = load(precision="float32"), load(precision="bfloat16")
    assert plain.autocast is None and cast.autocast is torch.bfloat16
    one, other = spoken(plain, uneven()), spoken(cast, uneven())
    assert other.logprobs.dtype == other.entropy.dtype == torch.float32
    mask = uneven().mask
    difference = (one.logprobs - other.logprobs)[mask].abs()
    assert 0 < difference.max() < 0.3  # three digits of bfloat16 on logits of about ten


@pytest.mark.parametrize(
    ("precision", "device", "fast", "wanted"),
    [
        ("auto", "cpu", True, None),
        ("auto", "cuda", True, torch.bfloat16),
        ("auto", "cuda", False, None),
        ("float32", "cuda", True, None),
        ("bfloat16", "cpu", False, torch.bfloat16),
    ],
)
def test_bfloat16_where_it_is_asked_for_or_the_device_is_fast_at_it(
    monkeypatch, precision, device, fast, wanted
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: fast)
    assert autocast_of(precision, torch.device(device)) == wanted


@pytest.mark.parametrize(
    ("there", "wanted"),
    [({"cuda", "mps"}, "cuda"), ({"mps"}, "mps"), ({"cuda"}, "cuda"), (set(), "cpu")],
)
def test_auto_takes_the_fastest_device_there_is(monkeypatch, there, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.mps, "is_available", lambda: "mps" in there)
    assert device_of("auto").type == wanted


@pytest.mark.parametrize("rank", [0, 3])
def test_each_of_torchruns_processes_has_a_card_of_its_own(monkeypatch, rank):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert device_of("cuda") == device_of("auto") == torch.device("cuda", rank)


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"^model.device: cuda is not available .*there is cpu$"):
        device_of("cuda")


@pytest.mark.parametrize(
    ("configured", "wanted"), [(1, [1]), ([7, 1, 5], [1, 5, 7]), (None, [1]), (9, [1, 9])], ids=str
)
def test_what_ends_a_response_is_the_models_list_and_the_tokenizers_token(configured, wanted):
    models = load()
    models.policy.generation_config.eos_token_id = configured
    assert models.stops() == wanted
