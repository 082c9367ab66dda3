"""The trained policy as a directory that plain transformers loads."""

import pytest
import torch
from peft import PeftModel
from trainer_parts import PROMPTS, RESPONSES, load, model_directory, nudge, step_by_step, uneven
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import assert_close
from klamp.train.models import distribution_of, read
from klamp.train.saving import save_model
from klamp.train.tasks.pretrain import BUILTIN


def spoken(models):
    with torch.no_grad():
        return distribution_of(read(models, models.policy, uneven()), 1.0)


def plain(network, row):
    return step_by_step(network, PROMPTS[row], RESPONSES[row]).float()


@pytest.mark.parametrize("kind", ["builtin", "gpt2", "gemma"])
def test_a_saved_policy_loads_with_plain_transformers_and_says_the_same(tmp_path, kind):
    path = kind if kind == "builtin" else model_directory(tmp_path / "base", kind)
    models = load(path=path)
    nudge(models.policy)
    saved = save_model(models, tmp_path)
    assert saved == tmp_path / "model"
    again, own = AutoModelForCausalLM.from_pretrained(saved), dict(models.policy.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in again.named_parameters())
    for row in range(3):
        wanted = spoken(models)[row, : len(RESPONSES[row])]
        torch.testing.assert_close(plain(again, row), wanted, rtol=1e-5, atol=2e-5)


def test_its_tokenizer_is_saved_with_it(tmp_path):
    models = load()
    tokenizer = AutoTokenizer.from_pretrained(save_model(models, tmp_path))
    assert tokenizer("s394=")["input_ids"] == models.tokenizer("s394=")["input_ids"]
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0


def test_a_saved_policy_is_a_model_path(tmp_path):
    models = load()
    nudge(models.policy)
    again = load(path=str(save_model(models, tmp_path)))
    assert torch.equal(spoken(again), spoken(models))
    assert again.stops() == models.stops()


def test_an_adapter_is_saved_beside_the_model_it_is_merged_into(tmp_path):
    models = load(lora={"rank": 4})
    nudge(models.policy, 0.1)
    before = spoken(models)
    merged = AutoModelForCausalLM.from_pretrained(save_model(models, tmp_path))
    base = AutoModelForCausalLM.from_pretrained(BUILTIN)
    names = {n for n, _ in base.named_parameters()}
    assert {n for n, _ in merged.named_parameters()} == names
    for row in range(3):
        wanted = before[row, : len(RESPONSES[row])]
        torch.testing.assert_close(plain(merged, row), wanted, rtol=1e-5, atol=1e-4)
        assert (plain(base, row) - wanted).abs().max() > 0.01
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for row in range(3):
        wanted = before[row, : len(RESPONSES[row])]
        torch.testing.assert_close(plain(adapted, row), wanted, rtol=1e-5, atol=1e-4)
    # Saving is not the end: the policy still has its adapter, and learns on.
    assert torch.equal(spoken(models), before)
    assert any("lora_" in n for n, p in models.policy.named_parameters() if p.requires_grad)


def test_a_model_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old.bin").write_text("old")
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "half.bin").write_text("half")
    place = save_model(load(), tmp_path)
    assert not (place / "old.bin").exists() and not (place / "half.bin").exists()
    assert not (tmp_path / ".model.partial").exists()
    assert_close(spoken(load(path=str(place))), spoken(load()))
