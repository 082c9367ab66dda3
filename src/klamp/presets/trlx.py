"""trlx 0.7.0: PPO as its accelerate trainer computes it, with the settings of its hh example.

Citations name files under ``trlx/``. Not followed, because they depend on padding or on the cut:
the score lands on the last token (upstream: two after it), whitening sees active tokens only and
the whole batch, the KL is that of the response, the loss is one mean over the step.
"""

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objective.advantages import GAE, Advantage, Whiten, gae
from klamp.objective.control import controller
from klamp.objective.kl import KLTerm
from klamp.objective.logratio import EXP_LIMIT, FLOAT32_LIMIT, excess, log_ratio, narrow
from klamp.objective.losses import ClippedSurrogate, ValueLoss
from klamp.objective.objective import Objective
from klamp.objective.reduce import shares, weighted_sum
from klamp.objective.rewards import ClipScores, ScaleScores, ScoreStage
from klamp.presets.controllers import AdaptiveKLController as AdaptiveKLController
from klamp.presets.controllers import FixedKLController as FixedKLController
from klamp.presets.running import RunningMoments as RunningMoments
from klamp.types import PerToken, Scalar

WHITEN = Whiten(ddof=1, eps=1e-8)  # utils/modeling.py whiten: rsqrt(var + 1e-8)


def objective(
    *,
    init_kl_coef: float = 0.05,
    target: float | None = 6.0,
    horizon: float = 10_000,
    gamma: float = 1.0,
    lam: float = 0.95,
    cliprange: float = 0.2,
    cliprange_value: float = 0.2,
    vf_coef: float = 1.0,
    scale_reward: str | None = None,
    ref_std: float | None = None,
    cliprange_reward: float | None = 10.0,
) -> Objective:
    """PPO with k1 in the reward and the adaptive controller; ``target=None`` fixes β."""
    if scale_reward not in (None, "ignored", "running", "ref"):
        raise ConfigError(f"scale_reward must be running, ref or None, got {scale_reward!r}")
    stages = list[ScoreStage]()
    if cliprange_reward:  # accelerate_ppo_trainer.py: clip before scaling
        stages.append(ClipScores(low=-cliprange_reward, high=cliprange_reward))
    if scale_reward == "running":  # accelerate_ppo_trainer.py: scores /= running_moments.std
        stages.append(ScaleScores(by="running"))
    if scale_reward == "ref":  # accelerate_ppo_trainer.py: scores /= ref_std
        stages.append(ScaleScores(by="reference", std=ref_std))
    return Objective(
        stages=tuple(stages),
        kl=KLTerm(
            estimator="k1",  # accelerate_ppo_trainer.py: -kl_ctl.value * log_ratio
            where="reward",
            control=controller(init_kl_coef, target, horizon),  # models/modeling_ppo.py
            watch="k3_reversed",  # accelerate_ppo_trainer.py: log_ratio.exp() - 1 - log_ratio
            watch_reduction="sequence_sum",  # accelerate_ppo_trainer.py: kl.sum(1).mean()
        ),
        advantage=Advantage(
            estimator=GAE(gamma=gamma, lam=lam),  # models/modeling_ppo.py
            whiten=WHITEN,  # models/modeling_ppo.py: use_whitening=True
        ),
        surrogate=ClippedSurrogate(low=cliprange, high=cliprange),  # models/modeling_ppo.py loss
        value_loss=ValueLoss(clip=cliprange_value, coef=vf_coef),  # models/modeling_ppo.py loss
        reduction="token_mean",  # models/modeling_ppo.py: sum(loss * mask) / n
    )


def rollout_kl(
    logprobs: PerToken, ref_logprobs: PerToken, attention_mask: Tensor
) -> tuple[PerToken, Scalar, Scalar]:
    """k3_reversed of each token, its mean over all cells, and its mean sum per row."""
    d = log_ratio(logprobs, ref_logprobs, attention_mask.bool()).value
    limit = FLOAT32_LIMIT if d.dtype == torch.float32 else 700.0  # as far as exp goes
    kl = excess(d, limit=limit)
    wide = kl.double()  # where the sum leaves float32, upstream is inf
    return kl, narrow(wide.mean(), kl.dtype), narrow(wide.sum(dim=1).mean(), kl.dtype)


def get_advantages_and_returns(
    values: PerToken,
    rewards: PerToken,
    response_length: int,
    use_whitening: bool = True,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[PerToken, PerToken]:
    """GAE over the first columns; whitened over all of them, padding included."""
    v, r = values[:, :response_length], rewards[:, :response_length]
    everywhere = torch.ones_like(r, dtype=torch.bool)
    advantages, returns = gae(r, v, everywhere, gamma=gamma, lam=lam)
    return (WHITEN(advantages, everywhere) if use_whitening else advantages), returns


def ppo_loss(
    logprobs: PerToken,
    values: PerToken,
    old_logprobs: PerToken,
    old_values: PerToken,
    advantages: PerToken,
    returns: PerToken,
    mask: Tensor,
    cliprange: float = 0.2,
    cliprange_value: float = 0.2,
    vf_coef: float = 1.0,
) -> tuple[Scalar, dict[str, float]]:
    """PPOConfig.loss: policy loss + vf_coef · value loss, and statistics."""
    active = mask.bool()
    share = shares(active)
    surrogate = ClippedSurrogate(low=cliprange, high=cliprange, clamp_log_ratio=EXP_LIMIT)
    policy = surrogate(logprobs, old_logprobs, advantages, active)
    value = ValueLoss(clip=cliprange_value)(values, old_values, returns, active)
    pg_loss = weighted_sum(policy.loss, share)
    vf_loss = weighted_sum(value.loss, share.to(value.loss)).to(pg_loss)
    moved = excess(log_ratio(logprobs.detach(), old_logprobs, active).value)
    clipped = (policy.clipped_low | policy.clipped_high).to(share)
    loss = pg_loss + vf_coef * vf_loss
    stats = {
        "losses/total_loss": loss.item(),
        "losses/policy_loss": pg_loss.item(),
        "losses/value_loss": vf_loss.item(),
        "policy/approx_kl": moved.mean().item(),
        "policy/clipfrac": weighted_sum(clipped, share).item(),
    }
    return loss, stats
