"""What the recorded calls do not show: extremes, empty rows, other types, wrong choices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import assert_close, make_batch, tensor
from klamp import presets
from klamp.errors import ConfigError
from klamp.presets import open_instruct, openrlhf, roll, trlx


def test_a_rollout_kl_that_leaves_float32_saturates():
    far = torch.zeros(2, 8)
    kl, per_token, per_sequence = trlx.rollout_kl(far, far - 100.0, torch.ones(2, 8))
    assert all(x.isfinite().all() for x in (kl, per_token, per_sequence))
    assert per_sequence > 1e38
    wide = trlx.rollout_kl(far.double(), far.double() - 90.0, torch.ones(2, 8))[2]
    assert wide.item() == pytest.approx(8 * (np.exp(90.0) - 91.0))


def test_a_row_without_an_action_has_its_score_in_the_last_column():
    kl = torch.zeros(2, 3)
    mask = tensor([1.0, 1.0, 0.0], [0.0, 0.0, 0.0])
    found = openrlhf.compute_reward(torch.tensor([1.0, 2.0]), 0.1, kl, mask)
    assert_close(found, tensor([0.0, 1.0, 0.0], [0.0, 0.0, 2.0]))


def test_numbers_may_be_tensors_or_numpy():
    controller = openrlhf.AdaptiveKLController(0.1, 6.0, 100)
    controller.update(torch.tensor(60.0), 10)
    other = trlx.AdaptiveKLController(0.1, 6.0, 100)
    other.update(np.float32(60.0), 10)
    assert controller.value == other.value == pytest.approx(0.1 * 1.02)
    loss = roll.agg_loss(tensor([1.0, 3.0]), tensor([1.0, 1.0]), "token-mean", torch.tensor(8))
    assert loss.item() == 0.5
    reward = openrlhf.compute_reward(1.0, torch.tensor(0.5), tensor([2.0, 2.0]))
    assert_close(reward, tensor([-1.0, 0.0]))


def test_unclamped_functions_go_as_far_as_float32():
    d = tensor([-70.0, 70.0])
    kl = open_instruct.estimate_kl(d, torch.ones(1, 2))
    assert kl[2, 0, 0].item() == pytest.approx(np.exp(70.0), rel=1e-5)
    gspo = openrlhf.PolicyLoss(policy_loss_type="gspo")
    loss = gspo(tensor([30.0]), tensor([0.0]), tensor([-1.0]), tensor([1.0]))[0]
    assert loss.item() == pytest.approx(np.exp(30.0), rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: openrlhf.compute_approx_kl(x, x, "k9"), "kl_estimator must be k1, k2 or k3"),
        (lambda x: roll.compute_approx_kl(x, x, None, "k9"), "kl_penalty must be one of kl, abs"),
        (lambda x: roll.agg_loss(x, x, "mean"), "loss_agg_mode must be one of token-mean"),
        (lambda x: open_instruct.grpo_loss(x, x, x, x, kl_estimator=7), "kl_estimator must be 0"),
        (
            lambda x: openrlhf.PolicyLoss(policy_loss_type="x")(x, x, x, x),
            "policy_loss_type must be ppo or gspo, got 'x'",
        ),
    ],
)
def test_an_unknown_choice_names_the_known_ones(call, message):
    with pytest.raises(ConfigError, match=message):
        call(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("roll", {"norm_mean_type": "batch"}, "grpo' normalises by group, got norm_mean_type='b"),
        ("openrlhf", {"estimator": "rloo", "gamma": 0.9}, "'rloo' needs gamma=1, got gamma=0.9"),
        (
            "openrlhf",
            {"policy_loss_type": "gspo", "is_correction_enable": True},
            "gspo' with is_correction_enable=True is not offered",
        ),
        ("openrlhf", {"eps_clip_low_high": (0.2,)}, r"must be two numbers \(low, high\), got"),
        ("open-instruct", {"loss_denominator": "row"}, "must be 'token' or a number, got 'row'"),
    ],
)
def test_contradictions_are_refused_by_both_names(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        presets.load(name, **settings)


RHO = {
    "clamp": {},
    "both": {"rho_clamp_lower_bound": 0.9, "rho_clamp_upper_bound": 1.1},
    "off": {"rho_clamp_upper_bound": 0.0},
    "masked": {"rho_mask_lower_bound": 0.9, "rho_mask_upper_bound": 1.1},
    "masked and clamped": {
        "rho_mask_lower_bound": 0.8,
        "rho_mask_upper_bound": 1.2,
        "rho_clamp_lower_bound": 0.95,
        "rho_clamp_upper_bound": 1.05,
    },
}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("settings", RHO.values(), ids=RHO)
def test_open_instruct_rho_correction(settings, sequence):
    """FIELD, in order: clamp the log-ratio, take the row's mean, drop outside, clamp the weight."""
    batch = make_batch()
    objective = presets.load("open-instruct", **settings, rho_mask_sequence_level=sequence)
    targets, _ = objective.prepare(batch, objective.init())
    lr = torch.where(batch.mask, batch.old_logprobs - batch.sampler_logprobs, 0.0).clamp(-10, 10)
    if sequence:
        lr = (lr.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)).expand_as(lr)
    rho = lr.exp()
    low, high = (settings.get(f"rho_mask_{b}_bound", 0.0) for b in ("lower", "upper"))
    kept = (rho >= low) & ((rho <= high) if high else torch.ones_like(batch.mask))
    top = settings.get("rho_clamp_upper_bound", 2.0) or torch.inf
    weights = torch.where(kept, rho.clamp(settings.get("rho_clamp_lower_bound", 0.0), top), 0.0)
    assert_close(targets.corrections[batch.mask], weights[batch.mask])


def test_openrlhf_seq_mask_tis_leaves_the_weights_of_what_it_keeps():
    batch = make_batch(sampler_logprobs=None)
    objective = presets.load(
        "openrlhf", is_correction_enable=True, is_correction_type="seq-mask-tis"
    )
    mismatch = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])  # e² = 7.4 is past the bound of 5
    batch = replace(batch, sampler_logprobs=batch.old_logprobs - mismatch, mask=batch.mask | True)
    targets, _ = objective.prepare(batch, objective.init())
    assert_close(targets.corrections, mismatch.exp().expand(8, 6))
