"""Whatever comes in, the loss and its gradient are finite, for every preset and many variants."""

import math
from dataclasses import replace

import pytest
import torch
from adversarial import batches
from hypothesis import HealthCheck, given, settings

from helpers import make_batch
from klamp import presets
from klamp.objective.advantages import Advantage, Returns, Whiten
from klamp.objective.control import AdaptiveKL, PIControl
from klamp.objective.correction import Correction
from klamp.objective.kl import KLTerm
from klamp.objective.losses import CISPO, PolicyGradient, ValueLoss
from klamp.objective.objective import Objective
from klamp.objective.rewards import CombineScores, NormaliseScores, PenaliseTruncated
from klamp.types import Batch

KLAMP = presets.load("klamp")
VARIANTS = {
    "klamp-importance": replace(KLAMP, kl=replace(KLAMP.kl, weighting="importance")),
    "klamp-unclamped": replace(KLAMP, kl=KLTerm(gradient="sequence", control=PIControl())),
    "klamp-token": replace(KLAMP, kl=KLTerm(gradient="token", weighting="importance")),
    "exact": replace(KLAMP, kl=KLTerm(estimator="exact", gradient="sequence")),
    "k3-value-importance": replace(KLAMP, kl=KLTerm(estimator="k3", weighting="importance")),
    "k3-reversed-pass": replace(KLAMP, kl=KLTerm(estimator="k3_reversed", clamp_gradient="pass")),
    "k2-clamped-pass": replace(
        KLAMP, kl=KLTerm(estimator="k2", clamp_value=10.0, clamp_gradient="pass")
    ),
    "cispo": replace(KLAMP, surrogate=CISPO(low=0.1, high=0.2), reduction="sequence_sum"),
    "reinforce++": Objective(
        stages=(CombineScores(weights=(1.0, 0.5), normalise=NormaliseScores()),),
        kl=KLTerm(estimator="k1", where="reward", control=AdaptiveKL()),
        advantage=Advantage(estimator=Returns(gamma=0.9), whiten=Whiten(), reward_clip=5.0),
        surrogate=PolicyGradient(),
        value_loss=ValueLoss(),
        reduction="constant_mean",
        constant=4.0,
    ),
    "openrlhf-k3-loss": presets.load(
        "openrlhf", estimator="rloo", kl_use_loss=True, kl_estimator="k3", dual_clip=3.0
    ),
    "openrlhf-gspo": presets.load("openrlhf", estimator="group_norm", policy_loss_type="gspo"),
    "roll-gae-running": presets.load(
        "roll",
        adv_estimator="gae",
        norm_mean_type="running",
        norm_std_type="running",
        add_token_level_kl=True,
        kl_penalty="k3",
        target_kl=0.1,
        whiten_rewards=True,
        whiten_advantages=True,
        difficulty_loss_weight=True,
        length_loss_weight=True,
        max_len_mask=True,
        dual_clip_loss=True,
        importance_sampling="seq",
        value_clip=0.2,
    ),
    "roll-kl-loss": presets.load("roll", use_kl_loss=True, kl_loss_coef=0.1),
    "trlx-running": presets.load("trlx", scale_reward="running", cliprange_reward=None),
    "icepop-shrink": replace(
        KLAMP,
        stages=(PenaliseTruncated(coef=-1.0),),
        correction=Correction(level="sequence", action="mask", low=0.5, denominator="shrink"),
    ),
}
OBJECTIVES = {name: presets.load(name) for name in presets.PRESETS} | VARIANTS


def check(objective, example):
    fields, logprobs, values, exact = example
    batch = Batch(**fields)
    targets, state = objective.prepare(batch, objective.init())
    assert all(map(math.isfinite, targets.metrics.values())), targets.metrics
    assert math.isfinite(state.kl_coef)
    assert state.kl_coef >= 0
    again, _ = objective.prepare(batch, state)
    leaves = [x.detach().clone().requires_grad_() for x in (logprobs, values, exact)]
    shares = objective.shares(again.mask, again.weights)
    out = objective.loss(leaves[0], batch, again, shares, values=leaves[1], exact_kl=leaves[2])
    out.loss.backward()
    assert out.loss.isfinite()
    assert all(math.isfinite(float(m)) for m in out.metrics.values())
    assert leaves[0].grad is not None
    for leaf in leaves:
        if leaf.grad is not None:
            assert leaf.grad.dtype == leaf.dtype
            assert leaf.grad.isfinite().all()
            assert (leaf.grad[~batch.mask] == 0).all()


quiet = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_finite_on_adversarial_batches(name):
    @settings(max_examples=60, **quiet)
    @given(batches())
    def run(example):
        check(OBJECTIVES[name], example)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.PRESETS)
def test_finite_on_ten_thousand_adversarial_batches(name):
    @settings(max_examples=10_000, database=None, **quiet)
    @given(batches())
    def run(example):
        check(OBJECTIVES[name], example)

    run()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_groups_filtered_out_gives_a_zero_loss_that_can_be_differentiated(name):
    objective = replace(OBJECTIVES[name], difficulty=presets.load("roll").difficulty)
    batch = replace(
        make_batch(),
        scores=torch.ones(8),
        components=torch.ones(8, 2),
        truncated=torch.zeros(8, dtype=torch.bool),
        exact_kl=torch.rand(8, 6),
    )
    targets, _ = objective.prepare(batch, objective.init())
    leaf = batch.old_logprobs.clone().requires_grad_()
    shares = objective.shares(targets.mask, targets.weights)
    out = objective.loss(leaf, batch, targets, shares, values=batch.values, exact_kl=batch.exact_kl)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert (leaf.grad == 0).all()
