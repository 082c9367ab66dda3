"""From token rewards to advantages, on the active tokens as if the others were not there.

Group-relative estimators are compositions, not functions: GRPO is ``NormaliseScores`` by group and
returns; Dr. GRPO the same without std; RLOO ``SubtractOthersMean`` and returns; REINFORCE++
returns and whitening; PPO is GAE and whitening.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.errors import DataError
from klamp.objective.active import Layout, layout
from klamp.objective.metrics import Metric, mean_of
from klamp.objective.moments import moments
from klamp.objective.scan import Scratch, discounted_sums, row_chunks
from klamp.objective.settings import require_choice, require_kind, require_number
from klamp.types import ALONE, PerToken, Scalar, TokenMask, Workers

LARGEST_ADVANTAGE = 1e20
"""e²⁰ times this is still a float32, so that no ratio can make the loss overflow."""
LARGEST_REWARD = 1e30
"""Thousands of these still add up to a float32."""


def returns_to_go(rewards: PerToken, mask: TokenMask, *, gamma: float = 1.0) -> PerToken:
    """Gₜ = rₜ + γ Gₜ₊₁ over active tokens; 0 elsewhere."""
    rewards, scratch = rewards.detach(), Scratch()
    out = rewards.new_empty(rewards.shape)
    for rows in row_chunks(rewards):
        active, r, to = layout(mask[rows], scratch), rewards[rows], out[rows]
        if active.column is None:
            discounted_sums(active.zeroed(r), gamma, out=to, overwrite=not active.full)
        else:
            packed = active.packed(active.zeroed(r, out=to))
            sums = discounted_sums(packed, gamma, overwrite=True)
            active.zeroed(active.spread(sums, to), out=to)
    return out


def gae(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[PerToken, PerToken]:
    """Aₜ = δₜ + γλ Aₜ₊₁ with δₜ = rₜ + γ Vₜ₊₁ − Vₜ, and the returns R = A + V, over active tokens.

    Reference: Schulman et al. 2015, https://arxiv.org/abs/1506.02438.
    """
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    rewards, values = rewards.detach().to(dtype), values.detach().to(dtype)
    # One allocation: two of this size, freed together, are handed back to the system each time.
    advantages, returns = rewards.new_empty(2, *rewards.shape).unbind()
    scratch = Scratch()
    for rows in row_chunks(rewards):
        active = layout(mask[rows], scratch)
        estimate = _in_front if active.column is None else _with_holes
        estimate(active, rewards[rows], values[rows], gamma, lam, advantages[rows], returns[rows])
    return advantages, returns


def _in_front(
    active: Layout, r: Tensor, v: Tensor, gamma: float, lam: float, a_out: Tensor, r_out: Tensor
) -> None:
    """Rₜ = xₜ + γλ Rₜ₊₁ with xₜ = rₜ + γ(1 − λ) Vₜ₊₁, and A = R − V."""
    r, v = active.zeroed(r, out=a_out), active.zeroed(v)
    torch.add(r[:, :-1], v[:, 1:], alpha=gamma * (1.0 - lam), out=a_out[:, :-1])
    a_out[:, -1:] = r[:, -1:]
    discounted_sums(a_out, gamma * lam, out=r_out, overwrite=True)
    torch.sub(r_out, v, out=a_out)


def _with_holes(
    active: Layout, r: Tensor, v: Tensor, gamma: float, lam: float, a_out: Tensor, r_out: Tensor
) -> None:
    """Rₜ = rₜ + γ Qₜ₊₁ with Qₜ = λ rₜ + (1 − λ) Vₜ + γλ Qₜ₊₁, and A = R − V.

    The same as in front, with one tensor to move to its neighbours in place of two.
    """
    mixed = active.zeroed(torch.lerp(v, r, lam, out=a_out), out=a_out)
    packed = active.packed(mixed)
    sums = active.scratch.take("sums", packed, packed.shape[1])
    discounted_sums(packed, gamma * lam, out=sums, overwrite=True)
    torch.add(r, active.spread(sums, r_out, ahead=1), alpha=gamma, out=r_out)
    torch.sub(r_out, v, out=a_out)
    active.zeroed(r_out, out=r_out)
    active.zeroed(a_out, out=a_out)


@dataclass(frozen=True, kw_only=True)
class Returns:
    """Discounted returns-to-go as advantages: no value function."""

    gamma: float = 1.0

    def __post_init__(self) -> None:
        require_number(self, "gamma", low=0.0, high=1.0)

    def __call__(
        self, rewards: PerToken, values: PerToken | None, mask: TokenMask
    ) -> tuple[PerToken, PerToken]:
        """The returns, twice: what to learn from, and what a value function would predict."""
        returns = returns_to_go(rewards, mask, gamma=self.gamma)
        return returns, returns


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Generalised advantage estimation; needs ``Batch.values``."""

    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        require_number(self, "gamma", "lam", low=0.0, high=1.0)

    def __call__(
        self, rewards: PerToken, values: PerToken | None, mask: TokenMask
    ) -> tuple[PerToken, PerToken]:
        """Advantages and returns."""
        if values is None:
            raise DataError(
                "GAE needs Batch.values, got None; give the critic's values, or use Returns"
            )
        return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True, kw_only=True)
class Whiten:
    """(x − mean) / √(var + eps) over the active tokens of all workers."""

    ddof: int = 0
    eps: float = 1e-8
    floor: bool = False
    """√max(var, eps) in place of √(var + eps)."""
    centre: bool = True
    scale: bool = True

    def __post_init__(self) -> None:
        require_choice(self, ddof=(0, 1))
        require_number(self, "eps", above=0.0)
        require_kind(self, floor=(bool,), centre=(bool,), scale=(bool,))

    def __call__(
        self,
        x: PerToken,
        mask: TokenMask,
        workers: Workers = ALONE,
        counted: TokenMask | None = None,
    ) -> PerToken:
        """x of mean 0 and variance 1 where counted (default: the mask); 0 where masked."""
        mean, scale = self.statistics(x, mask if counted is None else counted, workers)
        return torch.where(mask, (x - mean) * scale, 0.0)

    def statistics(
        self, x: PerToken, counted: TokenMask, workers: Workers = ALONE
    ) -> tuple[Scalar, Scalar]:
        """What is subtracted, and what is multiplied by."""
        m = moments(x, counted, workers)
        variance = m.m2 / (m.count - self.ddof).clamp(min=1.0)
        spread = variance.clamp(min=self.eps) if self.floor else variance + self.eps
        mean = m.mean if self.centre else torch.zeros_like(m.mean)
        scale = spread.rsqrt() if self.scale else torch.ones_like(spread)
        return mean.to(x), scale.to(x)


class AdvantageOutput(NamedTuple):
    """What the policy learns from, what the value function learns, and what was clipped."""

    advantages: PerToken
    returns: PerToken
    metrics: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """Token rewards → clip → whiten → estimate → whiten → clip; each off unless set."""

    estimator: Returns | GAE = Returns()
    reward_clip: float | None = None
    """Token rewards are clamped to ± this: after the KL is subtracted, before the estimate."""
    whiten_rewards: Whiten | None = None
    whiten: Whiten | None = None
    clip: float | None = None
    """Advantages are clamped to ± this."""

    def __post_init__(self) -> None:
        require_number(self, "reward_clip", "clip", above=0.0, optional=True)
        require_kind(self, estimator=(Returns, GAE))
        require_kind(self, whiten_rewards=(Whiten, None), whiten=(Whiten, None))

    def __call__(
        self,
        rewards: PerToken,
        values: PerToken | None,
        mask: TokenMask,
        workers: Workers = ALONE,
        counted: TokenMask | None = None,
    ) -> AdvantageOutput:
        """Advantages and returns; statistics see the counted tokens only."""
        counted = mask if counted is None else counted
        r_limit = LARGEST_REWARD if self.reward_clip is None else self.reward_clip
        a_limit = LARGEST_ADVANTAGE if self.clip is None else self.clip
        metrics = {"critic/token_reward_clip_frac": mean_of(rewards.abs() > r_limit, counted)}
        rewards = rewards.clamp(-r_limit, r_limit)
        if self.whiten_rewards is not None:
            rewards = self.whiten_rewards(rewards, mask, workers, counted)
        if values is not None:
            values = values.clamp(-LARGEST_REWARD, LARGEST_REWARD)
        advantages, returns = self.estimator(rewards, values, mask)
        if self.whiten is not None:
            advantages = self.whiten(advantages, mask, workers, counted)
        metrics["critic/advantage_clip_frac"] = mean_of(advantages.abs() > a_limit, counted)
        return AdvantageOutput(advantages.clamp(-a_limit, a_limit), returns, metrics)
