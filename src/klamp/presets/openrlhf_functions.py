"""OpenRLHF 0.11.0's functions under their own names, thin over the core."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objective import losses
from klamp.objective.active import place_on_last
from klamp.objective.advantages import gae, returns_to_go
from klamp.objective.estimators import clamped_estimate
from klamp.objective.logratio import EXP_LIMIT, RATIO_LIMIT
from klamp.objective.reduce import shares, weighted_sum
from klamp.types import PerSequence, PerToken, Scalar

KL_CLAMP = 10.0  # models/utils.py compute_approx_kl: clamp(min=-10, max=10)


def is_gspo(policy_loss_type: str) -> bool:
    """Whether the ratio is that of the sequence; what is neither ppo nor gspo is refused."""
    if policy_loss_type not in ("ppo", "gspo"):
        raise ConfigError(f"policy_loss_type must be ppo or gspo, got {policy_loss_type!r}")
    return policy_loss_type == "gspo"


def compute_approx_kl(
    log_probs: PerToken, log_probs_base: PerToken, kl_estimator: str = "k1"
) -> PerToken:
    """k1, k2 or k3, clamped to ±10; its gradient is finite however far the reference is."""
    if kl_estimator not in ("k1", "k2", "k3"):
        raise ConfigError(f"kl_estimator must be k1, k2 or k3, got {kl_estimator!r}")
    return clamped_estimate(kl_estimator, log_probs, log_probs_base, clamp_value=KL_CLAMP)


def compute_reward(
    r: PerSequence | float,
    kl_coef: float | Tensor,
    kl: PerToken,
    action_mask: Tensor | None = None,
    reward_clip_range: Sequence[float] | None = None,
) -> PerToken:
    """−β·kl at every token, plus the clipped score at the last action."""
    scores = torch.as_tensor(r, dtype=kl.dtype, device=kl.device).expand(len(kl))
    if reward_clip_range:
        scores = scores.clamp(min=reward_clip_range[0], max=reward_clip_range[1])
    mask = torch.ones_like(kl, dtype=torch.bool) if action_mask is None else action_mask.bool()
    mask = mask | ~mask.any(dim=-1, keepdim=True)  # without any action: the last column
    return place_on_last(scores, mask) - max(float(kl_coef), 0.0) * kl


def get_advantages_and_returns(
    values: PerToken, rewards: PerToken, action_mask: Tensor | None, gamma: float, lambd: float
) -> tuple[PerToken, PerToken]:
    """GAE over all columns, with values and rewards zeroed where there was no action."""
    v, r = (_zeroed(x, action_mask) for x in (values, rewards))
    return gae(r, v, torch.ones_like(r, dtype=torch.bool), gamma=gamma, lam=lambd)


def get_cumulative_returns(rewards: PerToken, action_mask: Tensor | None, gamma: float) -> PerToken:
    """Discounted returns-to-go over all columns, rewards zeroed where there was no action."""
    r = _zeroed(rewards, action_mask)
    return returns_to_go(r, torch.ones_like(r, dtype=torch.bool), gamma=gamma)


def _zeroed(x: PerToken, mask: Tensor | None) -> PerToken:
    return x if mask is None else torch.where(mask.bool(), x, 0.0)


@dataclass
class PolicyLoss:
    """models/loss.py PolicyLoss, without its parallel and correction arguments."""

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = None
    token_level_loss: bool = True
    policy_loss_type: str = "ppo"

    def __call__(
        self,
        log_probs: PerToken,
        old_log_probs: PerToken,
        advantages: PerToken,
        action_mask: Tensor,
    ) -> tuple[Scalar, Scalar, Scalar, None]:
        """(loss, clip ratio, −mean log-ratio, None)."""
        mask = action_mask.bool()
        gspo = is_gspo(self.policy_loss_type)
        policy = losses.ClippedSurrogate(
            low=self.clip_eps_low,
            high=self.clip_eps_high,
            dual=self.dual_clip,
            ratio="sequence" if gspo else "token",
            clamp_log_ratio=EXP_LIMIT if gspo else RATIO_LIMIT,  # upstream clamps only ppo's
        )(log_probs, old_log_probs, advantages, mask)
        per_token = shares(mask, reduction="token_mean")
        per_sample = shares(mask, reduction="sequence_mean")
        loss = weighted_sum(
            policy.loss, per_token if self.token_level_loss and not gspo else per_sample
        )
        clipped = (policy.clipped_low | policy.clipped_high).to(per_token)
        moved = weighted_sum((old_log_probs - log_probs).detach(), per_token)
        return loss, weighted_sum(clipped, per_token), moved, None


@dataclass
class ValueLoss:
    """models/loss.py ValueLoss."""

    clip_eps: float | None = None

    def __call__(
        self, values: PerToken, old_values: PerToken, returns: PerToken, action_mask: Tensor
    ) -> Scalar:
        """½ · token mean of max((V_clip − R)², (V − R)²)."""
        mask = action_mask.bool()
        tokens = losses.ValueLoss(clip=self.clip_eps)(values, old_values, returns, mask)
        return weighted_sum(tokens.loss, shares(mask).to(tokens.loss)).to(values.dtype)
