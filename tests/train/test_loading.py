"""From settings to networks: references, value functions, adapters, and what is refused."""

import sys

import pytest
import torch
from trainer_parts import load, model_directory, nudge, uneven, weights

from helpers import assert_close
from klamp.errors import ConfigError
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ValueLoss
from klamp.objective.objective import Objective
from klamp.train import loading
from klamp.train.models import forward
from klamp.train.settings import LoraSettings, ModelSettings
from klamp.train.tasks import alphabet

PLAIN, WITH_KL, WITH_VALUE = Objective(), Objective(kl=KLTerm()), Objective(value_loss=ValueLoss())
LORA = {"rank": 4}


def spoken(models, network):
    with torch.no_grad():
        return forward(models, network, uneven(), 1.0).logprobs


def asked(models):
    with models.as_reference() as reference:
        return spoken(models, reference)


def test_a_copy_is_frozen_and_says_the_same_whatever_the_policy_learns():
    models = load(WITH_KL, reference="copy")
    assert not any(p.requires_grad for p in models.reference.parameters())
    before = asked(models)
    assert torch.equal(before, spoken(models, models.policy))
    nudge(models.policy)
    assert torch.equal(asked(models), before)
    assert not torch.allclose(spoken(models, models.policy), before, atol=0.01)
    own = {p.data_ptr() for p in models.policy.parameters()}
    assert not own & {p.data_ptr() for p in models.reference.parameters()}


def test_with_the_adapter_off_the_policy_is_its_own_reference():
    models = load(WITH_KL, lora=LORA)
    base = spoken(load(), load().policy)
    nudge(models.policy, 0.1)
    assert models.reference is models.policy  # no second copy
    assert_close(asked(models), base)
    learnt = spoken(models, models.policy)
    assert (learnt - base)[uneven().mask].abs().max() > 0.1
    assert torch.equal(spoken(models, models.policy), learnt)  # it is on again


def test_a_fresh_adapter_changes_nothing():
    models = load(lora=LORA)
    assert_close(spoken(models, models.policy), spoken(load(), load().policy))


@pytest.mark.parametrize(
    ("settings", "objective", "wanted"),
    [
        ({}, PLAIN, "none"),
        ({}, WITH_KL, "copy"),
        ({"lora": LORA}, PLAIN, "none"),
        ({"lora": LORA}, WITH_KL, "adapter-off"),
        ({"reference": "copy"}, PLAIN, "copy"),
        ({"reference": "copy", "lora": LORA}, WITH_KL, "copy"),
        ({"reference": "adapter-off", "lora": LORA}, PLAIN, "adapter-off"),
        ({"reference": "none"}, PLAIN, "none"),
    ],
    ids=str,
)
def test_the_reference_is_what_is_asked_for_or_what_the_kl_needs(settings, objective, wanted):
    models = load(objective, **settings)
    found = "adapter-off" if models.reference is models.policy else "copy"
    assert ("none" if models.reference is None else found) == wanted


@pytest.mark.parametrize(
    ("settings", "objective", "said"),
    [
        ({"reference": "adapter-off"}, WITH_KL, r"adapter-off needs model\.lora.*set lora: \{\}$"),
        ({"reference": "none"}, WITH_KL, r"none, but the objective has a KL.*objective\.kl: null$"),
        ({"value": "none"}, WITH_VALUE, r"none, but the objective has a value loss; use own or sh"),
        ({"path": "/no/such/place"}, PLAIN, r"'/no/such/place' \(no such directory, and not on"),
    ],
    ids=["adapter-off", "reference none", "value none", "path"],
)
def test_what_does_not_go_together_is_refused_by_name(settings, objective, said):
    with pytest.raises(ConfigError, match=r"^model\.(reference|value|path): .*" + said):
        load(objective, **settings)


def test_a_directory_that_holds_no_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"\(is it a Hugging Face model\?\)") as found:
        load(path=str(tmp_path))
    assert "\n" not in str(found.value)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    model_directory(tmp_path, "gpt2")
    tokenizer = alphabet.tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no end-of-text token.*set eos_token"):
        load(path=str(tmp_path))


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    model_directory(tmp_path, "gpt2")
    tokenizer = alphabet.tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load(path=str(tmp_path)).tokenizer.pad_token_id == tokenizer.eos_token_id


def test_lora_without_peft_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs peft; `pip install klamp\[peft\]`"):
        load(lora=LORA)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")], ids=str)
def test_only_the_adapter_is_trained(targets):
    models = load(lora={"rank": 4, "alpha": 32, "target_modules": targets})
    trained = {n for n, p in models.policy.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained)
    touched = {n.split(".")[-4] for n in trained}
    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert touched == (everything if targets == "all-linear" else set(targets))
    adapter = models.policy.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha) == (4, 32)
    forward(models, models.policy, uneven(), 1.0).logprobs.sum().backward()
    assert {n for n, p in models.policy.named_parameters() if p.grad is not None} == trained


def test_an_adapters_dropout_does_not_make_the_policy_differ_from_pass_to_pass():
    models = load(lora={"rank": 4, "dropout": 0.5})
    nudge(models.policy, 0.1)
    assert torch.equal(spoken(models, models.policy), spoken(models, models.policy))


@pytest.mark.parametrize(
    ("kind", "objective", "wanted"),
    [
        ("auto", PLAIN, None),
        ("auto", WITH_VALUE, "own"),
        ("own", WITH_VALUE, "own"),
        ("shared", WITH_VALUE, "shared"),
        ("none", PLAIN, None),
        ("own", PLAIN, "own"),
    ],
    ids=["auto, no loss", "auto, loss", "own", "shared", "none", "own, no loss"],
)
def test_the_value_function_is_what_is_asked_for_or_what_the_loss_needs(kind, objective, wanted):
    value = load(objective, value=kind).value
    found = None if value is None else "shared" if value.trunk is None else "own"
    assert found == wanted


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_a_value_functions_own_trunk_starts_as_a_copy_of_the_policys(tmp_path, kind):
    models = load(WITH_VALUE, path=model_directory(tmp_path, kind))
    policy, own = weights(models.policy.base_model), weights(models.value.trunk)
    assert policy.keys() == own.keys()
    assert all(torch.equal(policy[n], own[n]) for n in policy)
    nudge(models.value.trunk)
    assert all(torch.equal(policy[n], p) for n, p in models.policy.base_model.named_parameters())
    assert all(p.requires_grad for p in models.value.parameters())


def test_a_value_functions_own_trunk_is_trained_whole_beside_an_adapter():
    models = load(WITH_VALUE, lora=LORA)
    assert all(p.requires_grad for p in models.value.parameters())
    assert not any("lora" in n for n, _ in models.value.named_parameters())


def test_settings_reach_the_networks():
    models = loading.load(
        ModelSettings(lora=LoraSettings(rank=2), device="cpu", precision="bfloat16"), WITH_KL
    )
    assert models.device == torch.device("cpu")
    assert models.autocast is torch.bfloat16
    assert next(models.policy.parameters()).dtype == torch.float32
