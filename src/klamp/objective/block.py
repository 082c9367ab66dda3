"""An ordinary block of tokens: value, metrics and gradient of the policy and KL terms at once.

    ∂/∂log π  =  − w Â ρ [not clipped]  +  β s c,     w = share · correction,  s = share,

with c the coefficient of the KL term's gradient. Ordinary is a block in which no clamp changes
anything and every number is finite, also those that are masked: multiplying by 0 is ten times as
fast as ``where`` on the CPU, and NaN survives it and is seen.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.objective.kl import KLTerm
from klamp.objective.logratio import EXCESS_LIMIT, LARGEST, LOG2_E, growth_and_ratio
from klamp.objective.losses import ClippedSurrogate


class Block(NamedTuple):
    """Some tokens in a row."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    corrections: Tensor
    shares: Tensor
    mask: Tensor
    ref: Tensor | None
    to_come: Tensor | None
    gradient: Tensor | None
    """Where it goes."""


class Space(NamedTuple):
    """Rows of scratch as long as a block, and some of them together, as numbers or as bits."""

    share: Tensor
    weight: Tensor
    grown: Tensor
    """π_ref/π − 1."""
    rho: Tensor
    minus_d: Tensor
    """log π_ref/π; then eˣ − 1 − x of it."""
    moved: Tensor
    """log π/π_old; then eˣ − 1 − x of it."""
    loose: Tensor
    up: Tensor
    log_ratios: Tensor
    ratios: Tensor
    summed: Tensor
    counted: Tensor
    active: Tensor
    """log₂ e where a token has a share, else 0: log-ratios are kept in bits, for 2ˣ."""


class Sums(NamedTuple):
    """What ordinary blocks add to the loss and the metrics."""

    tokens: float = 0.0
    ratio: float = 0.0
    moved: float = 0.0
    """∑ (ρ − 1 − log ρ)."""
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    gain: float = 0.0
    """∑ w · min(ρ Â, clip(ρ) Â)."""
    kl: float = 0.0
    kl_share: float = 0.0
    """∑ s · KL."""
    low: float = math.inf
    """The smallest log ρ."""
    high: float = -math.inf

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        if not self.tokens:
            return other
        sums = [a + b for a, b in zip(self[:-2], other[:-2], strict=True)]
        return Sums(*sums, low=min(self.low, other.low), high=max(self.high, other.high))


def space(scratch: Tensor) -> Space:
    """The rows of a [9, width] tensor by what they are used for."""
    share, weight, grown, rho, minus_d, moved, loose, up, active = scratch.unbind()
    return Space(
        *(share, weight, grown, rho, minus_d, moved, loose, up),
        log_ratios=scratch[4:6],
        ratios=scratch[2:4],
        summed=scratch[3:6],
        counted=scratch[6:8],
        active=active,
    )


def ordinary(
    surrogate: ClippedSurrogate, kl: KLTerm | None, kl_coef: float, block: Block, at: Space
) -> Sums | None:
    """The block's sums, its gradient written; None where a clamp or worse is at work."""
    torch.mul(block.shares, at.active.copy_(block.mask), out=at.share)  # float by bool is slow
    tokens = float(torch.gt(at.share, 0, out=at.active).sum())
    torch.sub(block.logprobs, block.old, out=at.moved)
    if block.ref is None:
        at.minus_d.zero_()
    else:
        torch.sub(block.ref, block.logprobs, out=at.minus_d)
    at.log_ratios.mul_(at.active.mul_(LOG2_E))
    lows = (at.log_ratios.amin(dim=1) / LOG2_E).tolist()
    highs = (at.log_ratios.amax(dim=1) / LOG2_E).tolist()
    if not _unclamped(surrogate, kl, lows, highs):
        return None
    low, high = lows[1], highs[1]
    if tokens < len(at.share) and not low < 0.0 < high:  # a masked token's 0 is no extreme
        low, high = _ends(at.moved[at.active > 0] / LOG2_E)
    wants_d = kl is not None and _needs_log_ratio(kl)
    minus_d = at.minus_d / LOG2_E if wants_d else None
    growth_and_ratio(at.log_ratios, min(lows), max(highs), out=at.ratios)
    ratios, excess, moved = at.summed.sum(dim=1).tolist()
    ratios -= len(at.share) - tokens
    gain, clipped_low, clipped_high = _gain(surrogate, block, at)
    if not math.isfinite(gain):
        return None
    sums = (tokens, ratios, moved, clipped_low, clipped_high, gain)
    found = (0.0, 0.0) if kl is None else _penalty(kl, kl_coef, excess, minus_d, block, at)
    return None if found is None else Sums(*sums, *found, low=low, high=high)


def _unclamped(
    surrogate: ClippedSurrogate, kl: KLTerm | None, lows: list[float], highs: list[float]
) -> bool:
    """Whether all log-ratios are where nothing is clamped; NaN is not."""
    limit = min(surrogate.clamp_log_ratio, EXCESS_LIMIT)
    dual = math.inf if surrogate.dual is None else math.log(surrogate.dual)
    inside = -limit <= lows[1] and highs[1] <= min(limit, dual)
    if kl is None or not inside:
        return inside
    (a, b), (c, d) = kl.bounds[kl.estimator], kl.bounds["coefficient"]
    return -min(b, d, LARGEST) <= lows[0] and highs[0] <= -max(a, c, -EXCESS_LIMIT)


def _ends(x: Tensor) -> tuple[float, float]:
    if not len(x):
        return math.inf, -math.inf
    low, high = torch.aminmax(x)
    return float(low), float(high)


def _needs_log_ratio(kl: KLTerm) -> bool:
    """k3 with its own gradient is made of e⁻ᵈ − 1 alone; all else also of d."""
    return kl.estimator != "k3" or kl.gradient != "value"


def _gain(surrogate: ClippedSurrogate, block: Block, at: Space) -> tuple[float, float, float]:
    """∑ w · min(ρ Â, clip(ρ) Â), and at how many tokens the clip is binding, low and high.

    Leaves − w Â ρ in ``gradient``, 0 where it is binding.
    """
    torch.mul(at.share, block.corrections, out=at.weight).neg_()
    clipped = torch.clamp(at.rho, 1.0 - surrogate.low, 1.0 + surrogate.high, out=at.up)
    clipped.mul_(block.advantages)
    plain = at.rho.mul_(block.advantages)
    torch.le(plain, clipped, out=at.loose)
    gain = -float(torch.dot(torch.minimum(plain, clipped, out=clipped), at.weight))
    if block.gradient is not None:
        torch.mul(plain.mul_(at.loose), at.weight, out=block.gradient)
    torch.gt(block.advantages, 0, out=at.up)
    loose, up = at.counted.sum(dim=1).tolist()
    high = up - float(torch.dot(at.up, at.loose))
    return gain, len(at.loose) - loose - high, high


def _penalty(
    kl: KLTerm, kl_coef: float, excess: float, minus_d: Tensor | None, block: Block, at: Space
) -> tuple[float, float] | None:
    """∑ KL and ∑ s · KL; adds β s c to ``gradient``. None where a sum to come is at its limit."""
    total, value, minus_c = excess, at.minus_d, at.grown  # of k3
    if minus_d is not None:
        minus_c = minus_d
        if kl.estimator == "k1":
            total = float(torch.neg(minus_d, out=value).sum())
        elif kl.estimator == "k2":
            total = float(torch.mul(minus_d, minus_d, out=value).mul_(0.5).sum())
    sums = total, float(torch.dot(value, at.share))
    if kl.gradient == "value" and kl.estimator == "k1":
        minus_c = at.grown.fill_(-1.0)
    elif kl.gradient == "sequence" and minus_d is not None and block.to_come is not None:
        torch.mul(block.to_come, at.active, out=at.loose).mul_(1.0 / LOG2_E)
        low, high = _ends(at.loose)
        limit = kl.clamp_to_come or LARGEST
        if not (-limit < low and high < limit):
            return None
        minus_c = minus_d.sub_(at.loose)
    if block.gradient is not None:
        block.gradient.addcmul_(minus_c, at.share, value=-kl_coef)
    return sums
