"""Hidden states: a prompt that is read once for its group says what it says in every row."""

from dataclasses import replace

import networks
import pytest
import torch
from networks import KINDS, ROWS, assert_same_gradients, gradients, network

from helpers import assert_close
from klamp.train import states
from klamp.train.states import head_of, shared, shares_prompts, splits, trunk_of, whole

SHARE = ["llama", "llama, scaled", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma"]
PLAIN = ["gemma2", "cohere", "mamba"]


def test_which_networks_may_share_a_prompt():
    assert [k for k in KINDS if shares_prompts(trunk_of(network(k)))] == [*SHARE, "cohere"]


def test_which_networks_logits_are_those_of_their_head():
    assert [k for k in KINDS if not splits(network(k))] == PLAIN


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", SHARE)
def test_sharing_changes_neither_states_nor_gradients(kind, rows):
    trunk, tokens = trunk_of(network(kind)), networks.rows(rows)
    plain, other = whole(trunk, tokens), shared(trunk, tokens)
    assert other.shape == plain.shape
    assert_close(other[tokens.mask], plain[tokens.mask])
    wanted = gradients(trunk, plain, tokens.mask)
    assert_same_gradients(gradients(trunk, other, tokens.mask), wanted)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_shares_too_whether_on_or_off(kind):
    import peft

    config = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2"
    )
    made = peft.get_peft_model(network(kind), config).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    trunk, tokens = trunk_of(made), networks.rows("groups in any order")
    assert shares_prompts(trunk) and splits(made)
    on = whole(trunk, tokens)
    assert_close(shared(trunk, tokens)[tokens.mask], on[tokens.mask])
    wanted, found = (gradients(trunk, way(trunk, tokens), tokens.mask) for way in (whole, shared))
    assert wanted and all("lora_" in name for name in wanted)
    assert_same_gradients(found, wanted)
    with made.disable_adapter(), torch.no_grad():
        off = whole(trunk, tokens)
        assert_close(shared(trunk, tokens)[tokens.mask], off[tokens.mask])
    assert (on - off)[tokens.mask].abs().max() > 0.1


def reads(trunk, tokens):
    """The shapes of what a trunk is given."""
    seen = []
    hook = trunk.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    states.states(trunk, tokens)
    hook.remove()
    return seen


def test_a_shared_prompt_is_read_once_and_no_token_more_than_needed():
    trunk = trunk_of(network("llama"))
    assert shares_prompts(trunk)
    tokens = networks.rows("groups together, unequal")
    assert reads(trunk, tokens) == [(3, 7), (6, 4)]
    assert reads(trunk, networks.rows("one token each")) == [(2, 5)]
    assert reads(trunk, networks.rows("nothing shared")) == [(3, 10)]
    assert reads(trunk, replace(tokens, groups=None)) == [(6, 12)]


def test_states_that_are_made_again_for_the_backward_pass_are_made_in_the_plain_way():
    made = network("llama")
    tokens = networks.rows("groups together, unequal")
    assert shares_prompts(trunk_of(made))
    made.gradient_checkpointing_enable()
    assert not shares_prompts(trunk_of(made))
    assert reads(trunk_of(made), tokens) == [(6, 12)]
    made.gradient_checkpointing_disable()
    assert shares_prompts(trunk_of(made))


def test_a_probe_is_made_once_and_leaves_nothing_behind(monkeypatch):
    made = network("llama")
    assert splits(made) and shares_prompts(trunk_of(made))
    assert not head_of(made)._forward_hooks

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(states, "agree", never)
    monkeypatch.setattr(states, "_hands_out_its_head", never)
    assert splits(made) and shares_prompts(trunk_of(made))


def test_a_network_that_refuses_a_cache_is_asked_in_the_plain_way(monkeypatch):
    trunk = trunk_of(network("llama"))

    def refuse(*_):
        raise ValueError("no cache")

    monkeypatch.setattr(states, "shared", refuse)
    assert not shares_prompts(trunk)
