"""One gradient however the batch is cut: micro-batches, row order, padding, inserted tokens."""

from dataclasses import fields, replace

import pytest
import torch

from helpers import assert_close, loss_and_grads, make_batch
from klamp import presets
from klamp.objective.reduce import REDUCTIONS

NAMES = list(presets.PRESETS)
EXTRA = {
    "openrlhf-rloo-k3-loss": presets.load(
        "openrlhf", estimator="rloo", kl_use_loss=True, kl_estimator="k3", is_correction_enable=True
    ),
    "openrlhf-gspo": presets.load("openrlhf", estimator="group_norm", policy_loss_type="gspo"),
    "roll-weights": presets.load(
        "roll",
        adv_estimator="gae",
        norm_mean_type="batch",
        norm_std_type="running",
        add_token_level_kl=True,
        whiten_advantages=True,
        difficulty_loss_weight=True,
        length_loss_weight=True,
        value_clip=0.2,
    ),
    "roll-kl-loss": presets.load("roll", use_kl_loss=True, kl_loss_coef=0.1),
    "klamp-importance": replace(
        presets.load("klamp"), kl=replace(presets.load("klamp").kl, weighting="importance")
    ),
}


def variants():
    for name, objective in ({n: presets.load(n) for n in NAMES} | EXTRA).items():
        for reduction in REDUCTIONS:
            refused = objective.kl is not None and objective.kl.gradient == "sequence"
            if reduction == "sequence_mean" and refused:
                continue
            constant = 5.0 if reduction == "constant_mean" else None
            changed = replace(objective, reduction=reduction, constant=constant)
            yield pytest.param(changed, id=f"{name}-{reduction}")


VARIANTS = list(variants())
each = pytest.mark.parametrize("objective", VARIANTS)


@pytest.fixture
def data():
    """A batch, current log-probs and current values; scores spread so that no filter takes all."""
    batch = make_batch(rows=12, width=7, group=4, difficulty=torch.rand(12))
    batch = replace(batch, scores=torch.rand(12) * 0.8 + 0.1)
    return batch, batch.old_logprobs + 0.2 * torch.randn(12, 7), batch.values + torch.randn(12, 7)


def whole(objective, batch, logprobs, values):
    targets, state = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)
    out, grads = loss_and_grads(objective, batch, targets, shares, logprobs, values)
    return out.loss.detach(), grads, state, targets


def same(found, wanted):
    """The same numbers, and gradients within 1e-5 of their largest entry."""
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)
        assert (a - b).abs().max() <= max(1e-5 * b.abs().max(), 1e-6 if b.ndim == 0 else 0.0)


@each
@pytest.mark.parametrize("size", [1, 5])
def test_micro_batches_add_up(objective, data, size):
    batch, logprobs, values = data
    loss, grads, _, targets = whole(objective, batch, logprobs, values)
    shares = objective.shares(targets.mask, targets.weights)
    total, parts = 0.0, [torch.zeros_like(g) for g in grads]
    for rows in torch.arange(12).split(size):
        cut = (batch.select(rows), targets.select(rows), shares[rows])
        out, part = loss_and_grads(objective, *cut, logprobs[rows], values[rows])
        total = total + out.loss.detach()
        for whole_grad, g in zip(parts, part, strict=True):
            whole_grad[rows] += g
    same([total, *parts], [loss, *grads])


@each
def test_the_order_of_rows_does_not_matter(objective, data):
    batch, logprobs, values = data
    loss, grads, state, _ = whole(objective, batch, logprobs, values)
    order = torch.randperm(12)
    found, shuffled, moved, _ = whole(
        objective, batch.select(order), logprobs[order], values[order]
    )
    same([found, *shuffled], [loss, *(g[order] for g in grads)])
    assert moved.kl_coef == pytest.approx(state.kl_coef, rel=1e-9)


def remapped(batch, column_of, width, junk):
    """The batch with column t moved to column_of[t] and junk, masked, everywhere else."""

    def move(x):
        if x is None or x.ndim < 2:
            return x
        fill = False if x.dtype == torch.bool else junk
        out = torch.full((len(x), width), fill, dtype=x.dtype)
        out[:, column_of] = x
        return out

    return type(batch)(**{f.name: move(getattr(batch, f.name)) for f in fields(batch)}), move


@each
@pytest.mark.parametrize("junk", [0.0, 1e30, float("nan"), float("-inf")])
def test_padding_and_inserted_tokens_change_nothing(objective, data, junk):
    batch, logprobs, values = data
    loss, grads, state, _ = whole(objective, batch, logprobs, values)
    column_of = torch.tensor([1, 2, 4, 5, 6, 9, 10])  # padding before, inside and after
    wide, move = remapped(batch, column_of, 13, junk)
    found, moved_grads, moved, _ = whole(objective, wide, move(logprobs), move(values))
    same([found, *(g[:, column_of] for g in moved_grads)], [loss, *grads])
    assert moved.kl_coef == pytest.approx(state.kl_coef, rel=1e-9)
    for g in moved_grads:
        assert (g.index_fill(1, column_of, 0.0) == 0).all()


def test_the_pair_that_is_another_objective_is_refused_unless_accepted():
    klamp = presets.load("klamp")
    with pytest.raises(ValueError, match="shares that depend on the own length"):
        replace(klamp, reduction="sequence_mean")
    accepted = replace(klamp, kl=replace(klamp.kl, accept_length_bias=True))
    assert replace(accepted, reduction="sequence_mean").reduction == "sequence_mean"
