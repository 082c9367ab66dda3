"""Policy surrogates and the value loss: per-token losses, before any averaging.

log π/π_old is clamped to ±20 before the exp in every surrogate; a clamped token has no gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.errors import DataError
from klamp.objective.logratio import LARGEST, RATIO_LIMIT, log_ratio, ratio, widen
from klamp.objective.moments import wide_dtype
from klamp.objective.settings import require_choice, require_number
from klamp.types import PerToken, TokenMask


class PolicyTokens(NamedTuple):
    """What a surrogate makes of each token."""

    loss: PerToken
    ratio: PerToken
    """π / π_old, of the token or of its sequence."""
    clipped_low: TokenMask
    """The clip is binding (it stops the gradient) at its lower end; for A < 0."""
    clipped_high: TokenMask
    clamped: TokenMask
    """log π/π_old left ±20."""
    dual_clipped: TokenMask
    """The dual clip is binding."""


class _Ratio(NamedTuple):
    value: PerToken
    clamped: TokenMask


def policy_ratio(
    logprobs: PerToken,
    old_logprobs: PerToken,
    mask: TokenMask,
    *,
    level: str = "token",
    clamp: float = RATIO_LIMIT,
) -> _Ratio:
    """π / π_old of each token, or exp of the response's mean log-ratio (GSPO, arXiv 2507.18071)."""
    if level == "token":
        log_r, clamped = log_ratio(logprobs, old_logprobs, mask, bounds=(-clamp, clamp))
        return _Ratio(ratio(log_r), clamped)
    log_r = log_ratio(logprobs, old_logprobs, mask).value
    mean = log_r.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    clamped = (mean.abs() > clamp).expand_as(mask) & mask
    return _Ratio(ratio(mean.clamp(-clamp, clamp)).expand_as(log_r), clamped)


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
    """PPO: −min(ρ Â, clip(ρ, 1 − low, 1 + high) Â), ρ = π / π_old.

    With ``dual`` = c, where Â < 0 the loss is at most −c Â (arXiv 1912.09729). With
    ``ratio="sequence"``, ρ is the response's (GSPO). Reference: Schulman et al. 2017, eq. 7; the
    asymmetric range is DAPO's (arXiv 2503.14476).
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    ratio: str = "token"
    clamp_log_ratio: float = RATIO_LIMIT

    def __post_init__(self) -> None:
        require_number(self, "low", above=0.0, high=1.0)
        require_number(self, "high", above=0.0)
        require_number(self, "dual", above=1.0, optional=True)
        require_number(self, "clamp_log_ratio", above=0.0, high=80.0)
        require_choice(self, ratio=("token", "sequence"))

    def __call__(
        self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PolicyTokens:
        """The loss of each token."""
        rho, clamped = policy_ratio(
            logprobs, old_logprobs, mask, level=self.ratio, clamp=self.clamp_log_ratio
        )
        plain = rho * advantages
        clipped = rho.clamp(1.0 - self.low, 1.0 + self.high) * advantages
        gain = torch.minimum(plain, clipped)
        binding = clipped < plain
        dual = torch.zeros_like(mask)
        if self.dual is not None:
            floor = self.dual * advantages
            dual = (advantages < 0) & (gain < floor)
            gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
        low, high = binding & (advantages < 0), binding & (advantages > 0)
        return PolicyTokens(-gain, rho, low, high, clamped, dual)


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """−sg(clip(ρ, 1 − low, 1 + high)) Â log π: a clipped token still learns (arXiv 2506.13585).

    ``low=None`` has no lower bound.
    """

    low: float | None = None
    high: float = 0.2

    def __post_init__(self) -> None:
        require_number(self, "low", above=0.0, high=1.0, optional=True)
        require_number(self, "high", above=0.0)

    def __call__(
        self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PolicyTokens:
        """The loss of each token."""
        rho, clamped = policy_ratio(logprobs.detach(), old_logprobs, mask)
        bottom = 0.0 if self.low is None else 1.0 - self.low
        weight = rho.clamp(bottom, 1.0 + self.high)
        loss = -weight * advantages * bounded_logprobs(logprobs, mask)
        never = torch.zeros_like(mask)
        return PolicyTokens(loss, rho, rho < bottom, rho > 1.0 + self.high, clamped, never)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """−Â log π: REINFORCE, for batches that are used once."""

    def __call__(
        self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PolicyTokens:
        """The loss of each token."""
        rho, clamped = policy_ratio(logprobs.detach(), old_logprobs, mask)
        never = torch.zeros_like(mask)
        loss = -advantages * bounded_logprobs(logprobs, mask)
        return PolicyTokens(loss, rho, never, never, clamped, never)


Surrogate = ClippedSurrogate | CISPO | PolicyGradient


class ValueTokens(NamedTuple):
    """What the value loss makes of each token."""

    loss: PerToken
    clipped: TokenMask


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """coef · ½ max((V − R)², (clip(V, V_old ± c) − R)²), squared in float64."""

    clip: float | None = None
    coef: float = 1.0

    def __post_init__(self) -> None:
        require_number(self, "clip", above=0.0, optional=True)
        require_number(self, "coef", low=0.0)

    def __call__(
        self, values: PerToken, old_values: Tensor | None, returns: PerToken, mask: TokenMask
    ) -> ValueTokens:
        """The loss of each token."""
        wide = wide_dtype(values)
        v = torch.where(mask, widen(values), 0.0).to(wide)
        r = torch.where(mask, returns, 0.0).to(wide)
        error = (v - r).square()
        clipped = torch.zeros_like(mask)
        if self.clip is not None:
            if old_values is None:
                raise DataError(
                    "ValueLoss.clip needs Batch.values to clip around, got None; give the old "
                    "values, or set clip=None"
                )
            old = torch.where(mask, old_values, 0.0).to(wide)
            near = v.clamp(old - self.clip, old + self.clip)
            near_error = (near - r).square()
            clipped = (near_error > error) & mask
            error = torch.maximum(error, near_error)
        return ValueTokens(self.coef * 0.5 * error, clipped)


def bounded_logprobs(logprobs: PerToken, mask: TokenMask) -> PerToken:
    """log π, 0 where masked."""
    return torch.where(mask, widen(logprobs), 0.0).clamp(-LARGEST, LARGEST)
