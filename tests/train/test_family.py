"""The Llama family in few calls: the same states, gradients and next tokens as the plain way."""

from dataclasses import replace

import networks
import pytest
import torch
from networks import KINDS, ROWS, assert_same_gradients, gradients, network
from trainer_parts import load, nudge, precise, uneven

from helpers import assert_close
from klamp.objective.losses import ValueLoss
from klamp.objective.objective import Objective
from klamp.train import family, memory, models, reader
from klamp.train.family import fits
from klamp.train.models import forward, values_of
from klamp.train.states import trunk_of, whole

FAMILY = ["llama", "llama, scaled", "mistral", "qwen2"]


def test_which_networks_are_of_the_family():
    assert [k for k in KINDS if fits(trunk_of(network(k)))] == FAMILY
    assert fits(trunk_of(load().policy))


def test_what_is_not_simple_is_left_to_the_network(monkeypatch):
    assert not fits(trunk_of(load(lora={"rank": 2}).policy))
    assert not fits(trunk_of(network("llama", attention_bias=True)))  # on the way out, too
    assert not fits(trunk_of(network("llama", mlp_bias=True)))
    made = network("llama")
    assert fits(trunk_of(made))
    made.gradient_checkpointing_enable()
    assert not fits(trunk_of(made))
    monkeypatch.setattr(family, "SMALL", 100)
    assert not fits(trunk_of(network("llama")))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", FAMILY)
def test_few_calls_change_neither_states_nor_gradients(kind, rows, known):
    trunk, tokens = trunk_of(network(kind)), networks.rows(rows)
    plain = whole(trunk, tokens)
    other = family.states(trunk, tokens if known else replace(tokens, groups=None))
    assert other.shape == plain.shape
    assert_close(other[tokens.mask], plain[tokens.mask])
    wanted = gradients(trunk, plain, tokens.mask)
    assert_same_gradients(gradients(trunk, other, tokens.mask), wanted)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_log_probs_entropies_and_values_are_the_same_either_way(monkeypatch, trunk):
    found = precise(load(Objective(value_loss=ValueLoss()), value=trunk))
    torch.nn.init.normal_(found.value.head.weight)
    tokens = replace(uneven(), groups=torch.tensor([0, 1, 2]))
    tokens = tokens.select(torch.tensor([0, 2, 2, 1, 0]))
    told = []
    for few in (True, False):
        monkeypatch.setattr(models.family, "fits", lambda trunk, few=few: few)
        out = forward(found, found.policy, tokens, 0.8)
        told.append((out.logprobs, out.entropy, values_of(found, tokens, out.reading)))
    for one, other in zip(*told, strict=True):
        assert_close(one[tokens.mask], other[tokens.mask])


def test_under_autocast_the_network_is_asked_itself(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(models.family, "states", never)
    found = load(precision="bfloat16")
    assert forward(found, found.policy, uneven(), 1.0).logprobs.isfinite().all()


def readers(found, prompts, mask, samples):
    """The two ways to read on, with what comes after the prompts."""
    plain = reader.Plain(found, mask, samples)
    first = plain.read(prompts).repeat_interleave(samples, dim=0)
    quick, other = reader.reader_of(found, prompts, mask, samples)
    assert isinstance(quick, reader.Decoder)
    assert_close(other, first)
    return quick, plain.repeated()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("long", [1, 10**9], ids=["shared prompts", "repeated prompts"])
@pytest.mark.parametrize("kind", FAMILY)
def test_token_by_token_it_says_what_the_network_says(monkeypatch, kind, long, padded):
    monkeypatch.setattr(memory, "LONG", long)
    monkeypatch.setattr(memory, "ROOM", 2)  # so that it has to grow
    found = replace(load(), policy=network(kind))
    tokens = networks.rows("nothing shared")
    if not padded:
        tokens = replace(tokens, prompt_mask=torch.ones_like(tokens.prompt_mask))
    with torch.inference_mode():
        quick, plain = readers(found, tokens.prompts, tokens.prompt_mask, 3)
        kept = iter([range(9), [0, 1, 2, 4, 5, 8], range(6), [1, 3, 5], [0, 2], range(2), [1]])
        for t, rows in enumerate(kept):
            rows = torch.tensor(list(rows))
            quick.keep(rows)
            plain.keep(rows)
            for _ in range(1 + 5 * (t == 1)):
                ids = torch.randint(2, 40, (len(rows),))
                assert_close(quick(ids), plain(ids))


def test_it_reads_with_the_weights_as_they_are():
    found = replace(load(), policy=network("llama"))
    tokens = networks.rows("nothing shared")
    for _ in range(2):
        nudge(found.policy, 0.1)
        with torch.inference_mode():
            readers(found, tokens.prompts, tokens.prompt_mask, 2)
