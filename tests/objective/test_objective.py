"""The three calls: what each promises to the loop that uses them."""

from dataclasses import replace

import pytest
import torch

from helpers import assert_close, loss_and_grads, make_batch, prefix_mask
from klamp import presets
from klamp.errors import ConfigError, DataError
from klamp.objective.advantages import GAE, Advantage, Whiten
from klamp.objective.catalogue import SETTINGS
from klamp.objective.control import AdaptiveKL, FixedKL, PIControl
from klamp.objective.correction import Correction
from klamp.objective.groups import Difficulty
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ValueLoss
from klamp.objective.metrics import merge, reduced
from klamp.objective.objective import Objective
from klamp.objective.rewards import ClipScores, NormaliseScores

GRPO = Objective(
    stages=(NormaliseScores(),),
    kl=KLTerm(control=AdaptiveKL(init_coef=0.1, target=0.05, horizon=100)),
    reduction="sequence_mean",
)
BOLD = [
    "critic/reward_clip_frac",
    "critic/token_reward_clip_frac",
    "critic/advantage_clip_frac",
    "critic/kl",
    "critic/kl_coef",
    "critic/kl_target",
    "critic/score/mean",
]


def prepared(objective, batch):
    return objective.prepare(batch, objective.init())[0]


def test_prepare_does_not_move_the_state_it_was_given():
    batch, state = make_batch(), GRPO.init()
    targets, moved = GRPO.prepare(batch, state)
    assert state == GRPO.init()
    assert moved.kl_coef != state.kl_coef
    assert targets.kl_coef == state.kl_coef  # before this batch's update


def test_on_policy_gradient_is_minus_the_advantage():
    batch = make_batch()
    free = replace(GRPO, kl=None)
    targets = prepared(free, batch)
    _, (grad,) = loss_and_grads(free, batch, targets, free.shares(batch.mask), batch.old_logprobs)
    lengths = batch.mask.sum(-1, keepdim=True)
    assert_close(grad, torch.where(batch.mask, -targets.advantages / lengths / 8, 0.0))


def test_without_advantages_the_gradient_pulls_towards_the_reference():
    batch = make_batch(scores=torch.ones(8))
    targets = prepared(GRPO, batch)
    _, (grad,) = loss_and_grads(GRPO, batch, targets, GRPO.shares(batch.mask), batch.old_logprobs)
    slope = 0.1 * (1 - torch.exp(batch.ref_logprobs - batch.old_logprobs))  # β · dk3/dlogπ
    assert_close(grad, torch.where(batch.mask, slope / batch.mask.sum(-1, keepdim=True) / 8, 0.0))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_metrics_that_dashboards_rely_on_are_always_there(name):
    targets = prepared(presets.load(name), make_batch())
    for metric in BOLD:
        assert isinstance(targets.metrics[metric], float), metric


def test_clip_fractions_count_what_was_changed():
    scores = torch.tensor([0.0, 1.0, 2.0, 30.0, -40.0, 0.5, 0.1, 0.2])
    objective = Objective(
        stages=(ClipScores(low=-5, high=5),), advantage=Advantage(reward_clip=1.5, clip=0.3)
    )
    mask = prefix_mask([1] * 8, 6)
    metrics = prepared(objective, make_batch(scores=scores, mask=mask)).metrics
    assert metrics["critic/reward_clip_frac"] == 2 / 8  # 30 and −40
    assert metrics["critic/token_reward_clip_frac"] == 3 / 8  # 2, 5 and −5, on one token each
    assert metrics["critic/advantage_clip_frac"] == 5 / 8  # 1, 1.5, 1.5, −1.5 and 0.5
    assert metrics["critic/score/mean"] == pytest.approx(scores.mean().item())


def test_a_missing_score_is_out_of_the_statistics_and_teaches_nothing():
    scores = torch.tensor([0.0, 1.0, float("nan"), 0.5, 1.0, 2.0, 3.0, 4.0])
    batch = make_batch(scores=scores)
    advantage = Advantage(estimator=GAE(), whiten=Whiten())
    objective = replace(GRPO, advantage=advantage, value_loss=ValueLoss())
    targets = prepared(objective, batch)
    assert (targets.advantages[2] == 0).all()
    assert_close(targets.returns[2], torch.where(batch.mask[2], batch.values[2], 0.0))
    assert targets.metrics["signal/missing_scores"] == 1
    assert targets.metrics["critic/score/mean"] == pytest.approx(11.5 / 7)
    known = batch.select([0, 1, 3, 4, 5, 6, 7])
    assert_close(prepared(objective, known).advantages, targets.advantages[[0, 1, 3, 4, 5, 6, 7]])
    with pytest.raises(DataError, match=r"scores is nan at row 2.*refuse.*drop"):
        prepared(replace(objective, missing_scores="refuse"), batch)


def test_a_filter_with_a_fixed_denominator_leaves_the_mask_and_one_that_shrinks_edits_it():
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])  # the first group is solved
    batch = make_batch(scores=scores)
    fixed = replace(GRPO, difficulty=Difficulty())
    targets = prepared(fixed, batch)
    assert targets.weights.tolist() == [0.0] * 4 + [1.0] * 4
    assert torch.equal(targets.mask, batch.mask)
    shares = fixed.shares(targets.mask, targets.weights)
    assert shares.sum().item() == pytest.approx(0.5)  # the other half of the average is lost
    shrunk = prepared(replace(GRPO, difficulty=Difficulty(denominator="shrink")), batch)
    assert not shrunk.mask[:4].any()
    assert GRPO.shares(shrunk.mask, shrunk.weights).sum().item() == pytest.approx(1.0)
    assert targets.metrics["signal/removed_by_difficulty"] == 4
    assert targets.metrics["signal/groups_effective"] == 1
    assert targets.metrics["signal/groups_without_spread"] == 1


def test_the_kl_is_watched_even_where_none_is_applied():
    batch = make_batch()
    metrics = prepared(replace(GRPO, kl=None), batch).metrics
    d = torch.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0.0)
    k3 = torch.expm1(-d) + d
    assert metrics["critic/kl"] == pytest.approx(k3.sum(1).mean().item(), rel=1e-5)
    assert metrics["critic/kl_per_token"] == pytest.approx(
        (k3.sum() / batch.mask.sum()).item(), rel=1e-5
    )
    assert metrics["critic/kl_coef"] == metrics["critic/kl_target"] == 0.0
    assert (
        prepared(replace(GRPO, kl=None), replace(batch, ref_logprobs=None)).metrics["critic/kl"]
        == 0
    )


@pytest.mark.parametrize("where", ["reward", "loss"])
@pytest.mark.parametrize(
    "control", [FixedKL(coef=0.1), AdaptiveKL(target=0.01), PIControl(target=0.01)]
)
def test_any_controller_drives_the_reward_or_the_loss(where, control):
    batch = make_batch()
    objective = replace(GRPO, kl=KLTerm(estimator="k1", where=where, control=control, watch="k3"))
    targets, state = objective.prepare(batch, objective.init())
    assert (state.kl_coef > targets.kl_coef) == (not isinstance(control, FixedKL))
    louder = replace(state, control=replace(state.control, coef=10.0))
    quiet, loud = (objective.prepare(batch, s)[0] for s in (state, louder))
    moved = (quiet.advantages - loud.advantages).abs().max().item()
    assert (moved > 0.1) == (where == "reward")
    assert loud.kl_coef == 10.0


def test_metrics_of_micro_batches_merge_to_those_of_the_whole():
    batch = make_batch()
    targets = prepared(GRPO, batch)
    shares = GRPO.shares(batch.mask)
    logprobs = batch.old_logprobs + 0.3 * torch.randn(8, 6)
    whole = reduced(GRPO.loss(logprobs, batch, targets, shares).metrics)
    merged = {}
    for rows in ([0], [1, 2, 3, 4], [5, 6, 7]):
        cut = (batch.select(rows), targets.select(rows), shares[rows])
        merged = merge(merged, GRPO.loss(logprobs[rows], *cut).metrics)
    assert reduced(merged) == pytest.approx(whole, rel=1e-5, abs=1e-8)
    assert whole["actor/clip_frac"] > 0
    assert whole["actor/ratio_max"] > 1.2 > 0.8 > whole["actor/ratio_min"]


def test_non_finite_log_probs_are_counted_not_raised():
    batch = make_batch()
    targets, shares = prepared(GRPO, batch), GRPO.shares(batch.mask)
    broken = batch.old_logprobs.clone()
    broken[0, 0] = float("nan")
    out = GRPO.loss(broken, batch, targets, shares)
    assert float(out.metrics["actor/nonfinite_tokens"]) == 1
    assert out.loss.isnan()  # and so it is seen by whoever looks at the loss alone


def test_mixed_dtypes_are_computed_in_the_widest_and_gradients_keep_their_own():
    batch = make_batch()
    mixed = replace(
        batch, old_logprobs=batch.old_logprobs.double(), ref_logprobs=batch.ref_logprobs.half()
    )
    leaf = batch.old_logprobs.bfloat16().requires_grad_()
    targets = prepared(GRPO, mixed)
    out = GRPO.loss(leaf, mixed, targets, GRPO.shares(batch.mask))
    out.loss.backward()
    assert out.loss.dtype == torch.float64
    assert leaf.grad.dtype == torch.bfloat16


def test_values_without_a_value_loss_are_ignored_and_the_reverse_is_an_error():
    batch = make_batch()
    targets, shares = prepared(GRPO, batch), GRPO.shares(batch.mask)
    plain = GRPO.loss(batch.old_logprobs, batch, targets, shares).loss
    assert_close(
        GRPO.loss(batch.old_logprobs, batch, targets, shares, values=batch.values).loss, plain
    )
    with_values = replace(GRPO, value_loss=ValueLoss())
    with pytest.raises(DataError, match=r"value_loss needs values.*got values=None; pass the"):
        with_values.loss(batch.old_logprobs, batch, targets, shares)
    with pytest.raises(DataError, match=r"entropy_coef is 0.01 but loss got entropy=None"):
        replace(GRPO, entropy_coef=0.01).loss(batch.old_logprobs, batch, targets, shares)


def test_the_entropy_bonus_is_its_share():
    batch = make_batch()
    targets, shares = prepared(GRPO, batch), GRPO.shares(batch.mask)
    entropy = torch.rand(8, 6).requires_grad_()
    out = replace(GRPO, entropy_coef=0.01).loss(
        batch.old_logprobs, batch, targets, shares, entropy=entropy
    )
    (grad,) = torch.autograd.grad(out.loss, entropy)
    assert_close(grad, -0.01 * shares)


def test_a_correction_weighs_the_policy_alone():
    batch = make_batch(scores=torch.ones(8))  # no advantage: only the KL is left
    corrected = replace(GRPO, correction=Correction(action="mask", low=0.999, high=1.001))
    loss = [
        o.loss(batch.old_logprobs, batch, prepared(o, batch), o.shares(batch.mask)).loss
        for o in (GRPO, corrected)
    ]
    assert_close(loss[0], loss[1])
    assert prepared(corrected, batch).metrics["actor/sampler_masked_frac"] > 0.9


def test_what_was_observed_has_no_gradient():
    """π_old given as the policy's own output must not cancel the gradient of the ratio."""
    batch = make_batch()
    leaf = batch.old_logprobs.clone().requires_grad_()
    live = replace(batch, old_logprobs=leaf * 1.0, ref_logprobs=leaf * 0.5)
    frozen = replace(batch, old_logprobs=leaf.detach(), ref_logprobs=leaf.detach() * 0.5)
    grads = []
    for b in (live, frozen):
        out = GRPO.loss(leaf, b, prepared(GRPO, b), GRPO.shares(b.mask))
        grads.append(torch.autograd.grad(out.loss, leaf)[0])
    assert_close(grads[0], grads[1])
    assert grads[0].abs().sum() > 0


def test_autocast_and_reduced_matmul_precision_do_not_reach_the_advantages():
    batch = make_batch(rows=8, width=64)
    objective = presets.load("openrlhf")
    plain = prepared(objective, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prepared(objective, batch).advantages, plain.advantages)
    torch.set_float32_matmul_precision("medium")
    try:
        assert_close(prepared(objective, batch).advantages, plain.advantages)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_loss_with_a_value_term_keeps_the_dtype_and_saturates():
    batch = make_batch()
    objective = replace(GRPO, value_loss=ValueLoss())
    targets, shares = prepared(objective, batch), GRPO.shares(batch.mask)
    values = torch.full((8, 6), 1e30).requires_grad_()
    out = objective.loss(batch.old_logprobs, batch, targets, shares, values=values)
    assert out.loss.dtype == torch.float32
    assert out.loss.isfinite()
    (grad,) = torch.autograd.grad(out.loss, values)
    assert_close(grad, 1e30 * shares)


def test_the_ratio_of_a_sequence_does_not_depend_on_shares():
    batch = make_batch()
    objective = presets.load("openrlhf", estimator="group_norm", policy_loss_type="gspo")
    targets = prepared(objective, batch)
    logprobs = batch.old_logprobs + 0.3 * torch.randn(8, 6)
    shares = objective.shares(targets.mask)
    half = shares.clone()
    half[:, 0] = 0.0
    whole = objective.loss(logprobs, batch, targets, shares).metrics["actor/ratio_max"]
    part = objective.loss(logprobs, batch, targets, half).metrics["actor/ratio_max"]
    assert float(part) <= float(whole)
    several = batch.mask.sum(1) > 1
    ratios = torch.where(batch.mask, logprobs - batch.old_logprobs, 0.0).sum(1) / batch.mask.sum(1)
    assert float(part) == pytest.approx(ratios[several].exp().max().item(), rel=1e-5)


def test_a_batch_without_an_active_token_is_refused_but_a_selection_is_legal():
    batch = make_batch(mask=prefix_mask([0, 3, 3, 3, 3, 3, 3, 3], 6))
    targets = prepared(GRPO, batch)
    shares = GRPO.shares(batch.mask)
    leaf = batch.old_logprobs[:1].clone().requires_grad_()
    out = GRPO.loss(leaf, batch.select([0]), targets.select([0]), shares[:1])
    out.loss.backward()
    assert out.loss.item() == 0.0
    with pytest.raises(DataError, match="no token was generated"):
        prepared(GRPO, make_batch(mask=torch.zeros(8, 6, dtype=torch.bool)))


def test_a_lone_sample_is_refused_by_name():
    with pytest.raises(DataError, match=r"got group 7 \(row 7\) with 1.*Raise samples_per_prompt"):
        prepared(GRPO, make_batch(groups=torch.tensor([0, 0, 0, 1, 1, 1, 1, 7])))


def test_the_state_of_another_objective_is_refused():
    with pytest.raises(
        DataError, match=r"state has 0 stage memories and control=None but the objective has 1"
    ):
        GRPO.prepare(make_batch(), Objective().init())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "mean"}, r"Objective.reduction must be one of token_mean.*got 'mean'"),
        ({"reduction": "constant_mean"}, r"constant goes with reduction='constant_mean'"),
        ({"constant": 8.0}, r"constant=8.0 reduction='sequence_mean'; set both or neither"),
        ({"missing_scores": "zero"}, r"Objective.missing_scores must be one of drop, refuse"),
        ({"stages": (ClipScores,)}, r"which is no stage; a stage has init\(\)"),
        ({"entropy_coef": float("inf")}, r"Objective.entropy_coef must be a finite number"),
    ],
)
def test_wrong_settings_are_refused_when_built(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(GRPO, **changes)


def test_an_objective_prints_compares_and_is_a_plain_dict():
    assert eval(repr(GRPO), {**SETTINGS, "Objective": Objective}) == GRPO
    assert Objective.from_dict(GRPO.to_dict()) == GRPO
    assert replace(GRPO, reduction="token_mean") != GRPO
    assert hash(GRPO) == hash(Objective.from_dict(GRPO.to_dict()))
