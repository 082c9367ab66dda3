"""Each preset's Objective, from Batch to gradient, against its system's functions put together."""

from dataclasses import replace

import pytest
import torch

from helpers import assert_close, make_batch
from klamp import presets
from klamp.presets import open_instruct, openrlhf, roll, trlx

G = 4


@pytest.fixture
def data():
    """A clean batch (contiguous masks, groups in order), and current log-probs and values."""
    batch = make_batch(rows=12, width=7, group=G)
    batch = replace(batch, scores=torch.rand(12), sampler_logprobs=None)
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(12, 7)).requires_grad_()
    values = (batch.values + 0.5 * torch.randn(12, 7)).requires_grad_()
    return batch, logprobs, values


def ours(objective, data):
    batch, logprobs, values = data
    targets, state = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)
    loss = objective.loss(logprobs, batch, targets, shares, values=values).loss
    return loss.float(), grads(loss, data), targets, state


def grads(loss, data):
    found = torch.autograd.grad(loss, data[1:], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, data[1:], strict=True)]


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def by_group(x):
    return x.view(-1, G)


def check(objective, data, by_hand):
    loss, found, targets, state = ours(objective, data)
    wanted = by_hand(data[0], *data[1:])
    assert_close(loss, wanted)
    assert_close(found, grads(wanted, data))
    assert any(g.abs().sum() > 0 for g in found)
    return targets, state


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
@pytest.mark.parametrize("norm", ["centered", "standard"])
def test_open_instruct(data, estimator, loss_fn, norm):
    def by_hand(batch, logprobs, values):
        scores = by_group(batch.scores)
        centred = scores - scores.mean(1, keepdim=True)
        if norm == "standard":
            centred = centred / (scores.std(1, correction=0, keepdim=True) + 1e-8)
        advantages = centred.flatten()[:, None].expand_as(logprobs)
        policy, _, kl = open_instruct.grpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            advantages,
            loss_fn=loss_fn,
            kl_estimator=estimator,
        )
        return token_mean(policy + 0.05 * kl, batch.mask)

    objective = presets.load(
        "open-instruct", kl_estimator=estimator, loss_fn=loss_fn, advantage_normalization_type=norm
    )
    check(objective, data, by_hand)


SHAPED = {
    "gae": lambda r: r,
    "reinforce": lambda r: r,
    "rloo": lambda r: r - (r.sum(1, keepdim=True) - r) / (G - 1),
    "reinforce_baseline": lambda r: r - r.mean(1, keepdim=True),
    "dr_grpo": lambda r: r - r.mean(1, keepdim=True),
    "group_norm": lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-9),
}


@pytest.mark.parametrize("kl_in_loss", [False, True])
@pytest.mark.parametrize("estimator", SHAPED)
def test_openrlhf(data, estimator, kl_in_loss):
    kind = "k3" if kl_in_loss else "k1"

    def by_hand(batch, logprobs, values):
        m = batch.mask.float()
        kl = openrlhf.compute_approx_kl(batch.old_logprobs, batch.ref_logprobs, kind)
        scores = SHAPED[estimator](by_group(batch.scores)).flatten()
        penalty = torch.zeros_like(kl) if kl_in_loss else kl
        rewards = openrlhf.compute_reward(scores, 0.01, penalty, m, (-10, 10))
        if estimator == "gae":
            a, returns = openrlhf.get_advantages_and_returns(batch.values, rewards, m, 1.0, 1.0)
        else:
            a = returns = openrlhf.get_cumulative_returns(rewards, m, 1.0)
        if estimator in ("gae", "reinforce", "reinforce_baseline"):
            mean = token_mean(a, m)
            var = token_mean((a - mean) ** 2, m)
            a = (a - mean) * var.clamp(min=1e-8).rsqrt()
        loss = openrlhf.PolicyLoss()(logprobs, batch.old_logprobs, a, m)[0]
        if estimator == "gae":
            loss = loss + openrlhf.ValueLoss(clip_eps=0.5)(values, batch.values, returns, m)
        if kl_in_loss:
            now = openrlhf.compute_approx_kl(logprobs, batch.ref_logprobs, kind)
            loss = loss + 0.01 * token_mean(now, m)
        return loss

    objective = presets.load(
        "openrlhf", estimator=estimator, kl_use_loss=kl_in_loss, kl_estimator=kind
    )
    check(objective, data, by_hand)


def test_openrlhf_adaptive_controller_watches_the_mean_of_masked_means(data):
    batch = data[0]
    objective = presets.load("openrlhf", kl_target=0.02)
    _, _, targets, state = ours(objective, data)
    kl = openrlhf.compute_approx_kl(batch.old_logprobs, batch.ref_logprobs)
    seen = ((kl * batch.mask).sum(1) / batch.mask.sum(1)).mean()
    controller = openrlhf.AdaptiveKLController(0.01, 0.02, 10_000)
    controller.update(seen.item(), 12)
    assert targets.kl_coef == 0.01
    assert targets.metrics["critic/kl"] == pytest.approx(seen.item(), rel=1e-5)
    assert state.kl_coef == pytest.approx(controller.value, rel=1e-9)


def test_openrlhf_gspo(data):
    def by_hand(batch, logprobs, values):
        m = batch.mask.float()
        scores = SHAPED["group_norm"](by_group(batch.scores)).flatten()
        kl = openrlhf.compute_approx_kl(batch.old_logprobs, batch.ref_logprobs)
        a = openrlhf.get_cumulative_returns(openrlhf.compute_reward(scores, 0.01, kl, m), m, 1.0)
        return openrlhf.PolicyLoss(policy_loss_type="gspo")(logprobs, batch.old_logprobs, a, m)[0]

    check(presets.load("openrlhf", estimator="group_norm", policy_loss_type="gspo"), data, by_hand)


AGGREGATE = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@pytest.mark.parametrize("mode", AGGREGATE)
@pytest.mark.parametrize("kl_loss", [False, True])
def test_roll_grpo(data, mode, kl_loss):
    batch = data[0]
    scores = batch.scores.clone()
    scores[:G] = 1.0  # one group is too easy
    data = (replace(batch, scores=scores), *data[1:])

    def by_hand(batch, logprobs, values):
        keep = roll.difficulty_mask(batch.scores, n_sample=G)
        final = batch.mask * keep[:, None]
        rewards = roll.reward_norm(
            batch.scores, n_sample=G, norm_mean_type="group", norm_std_type="group"
        ).clamp(-10, 10)
        placed = openrlhf.compute_reward(rewards, 0.0, torch.zeros_like(logprobs), batch.mask)
        a = roll.compute_reinforce_return(placed.clamp(-10, 10) * final, 1.0, 0.95)[0]
        a = (a * final).clamp(-2, 2)
        ratio = (logprobs - batch.old_logprobs).exp()
        policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        loss = roll.agg_loss(policy, final, mode)
        if kl_loss:
            kl = roll.compute_approx_kl(logprobs, batch.ref_logprobs, final, "k3")
            loss = loss + 0.1 * roll.agg_loss(kl, final, mode)
        return loss

    objective = presets.load("roll", loss_agg_mode=mode, use_kl_loss=kl_loss, kl_loss_coef=0.1)
    targets, _ = check(objective, data, by_hand)
    assert targets.metrics["signal/removed_by_difficulty"] == G


def test_roll_gae_with_everything_on(data):
    batch = replace(data[0], difficulty=torch.rand(12))
    data = (batch, *data[1:])

    def by_hand(batch, logprobs, values):
        keep = roll.difficulty_mask(batch.scores, n_sample=G)
        final = batch.mask & keep[:, None]
        rewards = roll.reward_norm(
            batch.scores, n_sample=G, norm_mean_type="batch", norm_std_type="batch"
        ).clamp(-1, 1)
        kl = roll.compute_approx_kl(batch.old_logprobs, batch.ref_logprobs, batch.mask, "kl")
        placed = openrlhf.compute_reward(rewards, 0.2, kl, batch.mask).clamp(-1, 1)
        v = torch.where(batch.mask, batch.values, 0.0)  # upstream's own, but for its pads
        a, returns = roll.compute_gae_advantage_return(placed * batch.mask, v, 1.0, 0.95)
        a = (roll.masked_whiten(a, final) * final).clamp(-2, 2)
        ratio = (logprobs - batch.old_logprobs).exp()
        policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        policy = torch.where(a < 0, -torch.max(-policy, 1.4 * a), policy)
        weights = roll.compute_sample_weights(
            batch.mask, batch.difficulty, difficulty_loss_weight=True, length_loss_weight=True
        )
        mode = "seq-mean-token-mean"
        loss = roll.agg_loss(policy, final, mode, weights=weights)
        near = batch.values + (values - batch.values).clamp(-0.2, 0.2)
        squared = torch.max((values - returns) ** 2, (near - returns) ** 2)
        return loss + 0.5 * roll.agg_loss(squared, final, mode)

    objective = presets.load(
        "roll",
        adv_estimator="gae",
        norm_mean_type="batch",
        norm_std_type="batch",
        reward_clip=1.0,
        add_token_level_kl=True,
        whiten_advantages=True,
        difficulty_loss_weight=True,
        length_loss_weight=True,
        dual_clip_loss=True,
        value_clip=0.2,
    )
    targets, _ = check(objective, data, by_hand)
    assert targets.metrics["critic/reward_clip_frac"] > 0


@pytest.mark.parametrize("scale", [None, "running", "ref"])
def test_trlx(data, scale):
    def by_hand(batch, logprobs, values):
        m = batch.mask.float()
        scores = batch.scores.clamp(-10, 10)
        if scale:  # in the first batch the running std is the reference std
            scores = scores / scores.std()
        d = batch.old_logprobs - batch.ref_logprobs
        rewards = openrlhf.compute_reward(scores, 0.05, d, m)
        a, returns = openrlhf.get_advantages_and_returns(batch.values, rewards, m, 1.0, 0.95)
        a = roll.masked_whiten(a, m)  # trlx's whitening, on active tokens
        return trlx.ppo_loss(logprobs, values, batch.old_logprobs, batch.values, a, returns, m)[0]

    targets, state = check(presets.load("trlx", scale_reward=scale), data, by_hand)
    _, _, mean_kl = trlx.rollout_kl(data[0].old_logprobs, data[0].ref_logprobs, data[0].mask)
    controller = trlx.AdaptiveKLController(0.05, 6, 10_000)
    controller.update(mean_kl.item(), 12)
    assert targets.metrics["critic/kl"] == pytest.approx(mean_kl.item(), rel=1e-5)
    assert state.kl_coef == pytest.approx(controller.value, rel=1e-9)


def test_trlx_without_a_target_is_fixed():
    objective = presets.load("trlx", target=None)
    assert objective.kl.control == presets.trlx.controller(0.05, None)
    assert objective.init().kl_coef == 0.05


def test_klamp_is_grpo_with_the_sequence_gradient(data):
    """On-policy, the gradient is −A + β · (d + k3 to come − siblings' mean), each over N tokens."""
    batch = data[0]
    logprobs = batch.old_logprobs.clone().requires_grad_()

    def by_hand():
        scores = by_group(batch.scores)
        a = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
        d = torch.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0.0)
        k3 = torch.expm1(-d) + d
        ahead = k3.flip(1).cumsum(1).flip(1) - k3
        total = ahead.view(-1, G, 7).sum(1, keepdim=True)
        others = ((total - ahead.view(-1, G, 7)) / (G - 1)).view(12, 7)
        coef = -a.flatten()[:, None] + 0.05 * (d + ahead - others)
        return torch.where(batch.mask, coef, 0.0) / batch.mask.sum()

    objective = presets.load("klamp")
    targets, _ = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)
    out = objective.loss(logprobs, batch, targets, shares)
    assert_close(torch.autograd.grad(out.loss, logprobs)[0], by_hand())
