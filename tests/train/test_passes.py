"""The loss by tiles of logits is the loss by all logits, whatever the objective asks for."""

import pytest
import torch
from test_update import PATHS, Steps, everyone, make

from helpers import assert_close
from klamp.train import models as networks
from klamp.train import passes

__all__ = ["make"]
KINDS = {
    **PATHS,
    "ratio of the sequence": (None, ("objective.surrogate.ratio=sequence",)),
    "warm": (None, ("sampling.temperature=1.7",)),
    "warm exact KL": (None, ("sampling.temperature=0.7", "objective.kl.estimator=exact")),
}


def learnt(make, monkeypatch, file, overrides, held):
    """Gradients and metrics of one update, and how many passes went by tiles."""
    monkeypatch.setattr(networks, "HELD", held)
    made, tiled = make(*overrides, file=file), []

    def counted(*args, **kwargs):
        tiled.append(1)
        return head_loss(*args, **kwargs)

    head_loss = passes.head_loss
    monkeypatch.setattr(passes, "head_loss", counted)
    run, samples, batch, targets, _ = made
    steps = Steps(run.learner.optimizer)
    numbers, problem = run.learner.update(samples.tokens, batch, targets, everyone(batch))
    monkeypatch.undo()
    assert problem is None
    return steps.gradients[0], numbers, len(tiled), batch


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_the_gradients_and_metrics_of_all_logits(make, monkeypatch, kind):
    file, overrides = KINDS[kind]
    whole, wanted, none, before = learnt(make, monkeypatch, file, overrides, held=1 << 40)
    tiled, found, some, batch = learnt(make, monkeypatch, file, overrides, held=-1)
    assert none == 0 and some > 0
    for name in ("old_logprobs", "ref_logprobs", "exact_kl", "values"):
        one, other = getattr(batch, name), getattr(before, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(tiled, whole, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            scale = float(other.abs().max())
            assert_close(one, other, rtol=1e-4, atol=1e-5 * scale + 1e-9)
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_head_that_is_more_than_its_weight_is_asked_itself(make, monkeypatch):
    run, samples, *_ = make("model.lora={rank: 4, target_modules: [lm_head, q_proj]}")
    monkeypatch.setattr(networks, "HELD", -1)
    with torch.no_grad():
        assert not networks.read(run.models, run.models.policy, samples.tokens).tiled


def test_a_bad_log_prob_is_named_also_by_tiles(make, monkeypatch):
    run, samples, batch, targets, _ = make()
    monkeypatch.setattr(networks, "HELD", -1)
    head = run.models.policy.get_output_embeddings()
    with torch.no_grad():
        head.weight[int(samples.tokens.responses[2, 0])] = float("nan")
    _, problem = run.learner.update(samples.tokens, batch, targets, everyone(batch))
    assert problem is not None and "logprobs at row" in problem
