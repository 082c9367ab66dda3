"""The one place that exponentiates a difference of log-probs.

Float32 or wider whatever comes in, masked positions replaced before the exp, clamped before the
exp, and every clamp says which tokens it changed. ``inf · 0`` and NaN at a masked position can
reach neither a value nor a gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp import arrays
from klamp.arrays import Array, np
from klamp.types import PerToken, TokenMask

EXP_LIMIT = 80.0
"""e⁸⁰ ≈ 5.5e34: a sum of thousands of them is still a float32."""
FLOAT32_LIMIT = 88.0
"""As far as exp goes in float32, for what upstream leaves unclamped."""
EXCESS_LIMIT = 60.0
"""e⁶⁰ times an importance weight of e²⁰ is no more than that."""
RATIO_LIMIT = 20.0
"""What log π/π_old is clamped to in every surrogate."""
LARGEST_RATIO = 485165195.4
"""e²⁰."""
LARGEST = 1e15
"""No log-prob or log-ratio counts for more; its square is still a float32."""

Bounds = tuple[float, float]


class LogRatio(NamedTuple):
    """A clamped log-ratio and the active tokens that the clamp changed."""

    value: PerToken
    clamped: TokenMask


def log_ratio(
    numerator: PerToken,
    denominator: PerToken,
    mask: TokenMask | None = None,
    *,
    bounds: Bounds = (-LARGEST, LARGEST),
    gradient: str = "zero",
) -> LogRatio:
    """clamp(log p − log q, bounds), 0 where masked.

    ``gradient="zero"`` has no gradient where it was clamped; ``"pass"`` has 1 there, so that what
    is computed from it keeps its derivative at the clamp's edge.
    """
    raw = widen(numerator) - widen(denominator)
    if mask is not None:
        raw = torch.where(mask, raw, 0.0)
    low, high = bounds
    value = raw.clamp(low, high)
    clamped = (raw < low) | (raw > high)
    if gradient == "pass":
        value = value.detach() + straight_through(raw)
    return LogRatio(value, clamped)


def ratio(log_r: Tensor) -> Tensor:
    """p / q = exp(log p − log q), bounded by e^±80."""
    return log_r.clamp(-EXP_LIMIT, EXP_LIMIT).exp()


def bounded_ratio(log_r: Tensor) -> Tensor:
    """p / q for a log-ratio that is already inside ±80."""
    return log_r.exp()


def own_ratio(logprobs: PerToken, old_logprobs: PerToken, mask: TokenMask) -> PerToken:
    """π / π_old of each token, its log clamped to ±20; 1 where masked."""
    bounds = (-RATIO_LIMIT, RATIO_LIMIT)
    return ratio(log_ratio(logprobs, old_logprobs, mask, bounds=bounds).value)


class PrefixRatios(NamedTuple):
    """∏_{s≤t} π/π_old and ∏_{s<t} π/π_old over the active tokens."""

    through: Tensor | float
    before: Tensor | float
    clamped: Tensor | bool


NO_WEIGHTS = PrefixRatios(1.0, 1.0, False)


def prefix_ratios(logprobs: PerToken, old_logprobs: PerToken, mask: TokenMask) -> PrefixRatios:
    """How much likelier the current policy makes each prefix, its log clamped to ±20; detached."""
    step = log_ratio(logprobs.detach(), old_logprobs, mask).value
    through = step.cumsum(dim=1)
    before = torch.nn.functional.pad(through, (1, 0))[:, :-1]  # shifted, not subtracted: exact
    through_ratio, before_ratio = (
        ratio(x.clamp(-RATIO_LIMIT, RATIO_LIMIT)) for x in (through, before)
    )
    return PrefixRatios(through_ratio, before_ratio, through.abs() > RATIO_LIMIT)


def excess(log_r: Tensor, limit: float = EXCESS_LIMIT) -> Tensor:
    """eˣ − 1 − x: what exp adds to its tangent at 0; expm1 keeps it from vanishing near 0."""
    x = log_r.clamp(-LARGEST, limit)
    return torch.expm1(x) - x


def excess_near(x: Tensor, power: Tensor) -> Tensor:
    """eˣ − 1 − x given eˣ, by its series where x is small: a compiler makes one loop of it."""
    series = 1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))
    near = x * x * (0.5 + x * (1 / 6 + x * series))
    return torch.where(x.abs() < 0.25, near, power - 1.0 - x)


SMALL = 0.0625
"""Where all x are smaller, eˣ − 1 by way of eˣ would lose digits."""


def growth(x: Array, *, near: bool, out: Array) -> None:
    """eˣ − 1 into ``out``, and x becomes eˣ − 1 − x; ``near``: no |x| is above ``SMALL``."""
    if near or arrays.VECTOR_EXPM1:
        np.expm1(x, out=out)
    else:
        np.exp(x, out=out)
        out -= 1.0
    np.subtract(out, x, out=x)


def straight_through(x: Tensor) -> Tensor:
    """x − sg(x): worth 0, with the gradient of x (none past ±1e15: inf − inf would be NaN)."""
    x = x.clamp(-LARGEST, LARGEST)
    return x - x.detach()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a narrower dtype, saturated where it does not fit; the gradient is x's all the same."""
    limit = torch.finfo(dtype).max
    return x.detach().clamp(-limit, limit).to(dtype) + (x - x.detach()).to(dtype)


def widen(x: Tensor) -> Tensor:
    """x in float32 or wider. The gradient comes back in x's own dtype, saturated, never inf."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return _Widen.apply(x)
    return x


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return x.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        limit = torch.finfo(ctx.dtype).max
        return grads[0].clamp(-limit, limit).to(ctx.dtype)
