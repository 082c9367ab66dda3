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
from klamp.objective.logratio import EXCESS_LIMIT, LARGEST, LOG2_E, growth
from klamp.objective.losses import ClippedSurrogate

ROWS = 5


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
    """Rows of scratch as long as a block, each for one thing after the other, some together."""

    share: Tensor
    grown: Tensor
    """π_ref/π − 1."""
    rise: Tensor
    """log₂ e where a token has a share, else 0; then ρ − 1; then ρ Â."""
    minus_d: Tensor
    """log π_ref/π in bits, for 2ˣ; then eˣ − 1 − x of it; then spare."""
    moved: Tensor
    """log ρ in bits; then eˣ − 1 − x of it; then 1 where the clip is not binding."""
    log_ratios: Tensor
    rises: Tensor
    summed: Tensor


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
    """The rows of a [ROWS, width] tensor by what they are used for."""
    share, grown, rise, minus_d, moved = scratch.unbind()
    together = {"log_ratios": scratch[3:5], "rises": scratch[1:3], "summed": scratch[2:5]}
    return Space(share, grown, rise, minus_d, moved, **together)


def ordinary(
    surrogate: ClippedSurrogate, kl: KLTerm | None, kl_coef: float, block: Block, at: Space
) -> Sums | None:
    """The block's sums, its gradient written; None where a clamp or worse is at work."""
    active = at.rise.copy_(block.mask)  # as numbers: a product with bools is slow
    torch.mul(block.shares, active, out=at.share)
    tokens = float(torch.gt(at.share, 0, out=active).sum())
    torch.sub(block.logprobs, block.old, out=at.moved)
    if block.ref is None:
        at.minus_d.zero_()
    else:
        torch.sub(block.ref, block.logprobs, out=at.minus_d)
    at.log_ratios.mul_(active.mul_(LOG2_E))
    (least, most), (low, high) = _ends(at.minus_d), _ends(at.moved)
    if not _unclamped(surrogate, kl, (least, most), (low, high)):
        return None
    ends = min(least, low), max(most, high)
    if tokens < len(at.share) and not low < 0.0 < high:  # a masked token's 0 is no extreme
        low, high = _ends(at.moved[active > 0])
    minus_d = at.minus_d / LOG2_E if kl is not None and _needs_log_ratio(kl) else None
    growth(at.log_ratios, *ends, out=at.rises)
    rise, excess, moved = at.summed.sum(dim=1).tolist()
    seen = (0.0, 0.0) if kl is None else _seen(kl, excess, minus_d, at)
    gain, clipped_low, clipped_high = _gain(surrogate, block, at)
    pulled = kl is None or _pull(kl, kl_coef, minus_d, block, at)
    if not pulled or not math.isfinite(gain):
        return None
    sums = (tokens, tokens + rise, moved, clipped_low, clipped_high, gain, *seen)
    return Sums(*sums, low=low, high=high)


def _unclamped(
    surrogate: ClippedSurrogate,
    kl: KLTerm | None,
    of_minus_d: tuple[float, float],
    of_log_rho: tuple[float, float],
) -> bool:
    """Whether all log-ratios are where nothing is clamped; NaN is not."""
    limit = min(surrogate.clamp_log_ratio, EXCESS_LIMIT)
    dual = math.inf if surrogate.dual is None else math.log(surrogate.dual)
    inside = -limit <= of_log_rho[0] and of_log_rho[1] <= min(limit, dual)
    if kl is None or not inside:
        return inside
    (a, b), (c, d) = kl.bounds[kl.estimator], kl.bounds["coefficient"]
    least, most = of_minus_d
    return -min(b, d, LARGEST) <= least and most <= -max(a, c, -EXCESS_LIMIT)


def _ends(bits: Tensor) -> tuple[float, float]:
    """The least and the largest, in nats."""
    if not len(bits):
        return math.inf, -math.inf
    low, high = torch.aminmax(bits)
    return float(low) / LOG2_E, float(high) / LOG2_E


def _needs_log_ratio(kl: KLTerm) -> bool:
    """k3 with its own gradient is made of e⁻ᵈ − 1 alone; all else also of d."""
    return kl.estimator != "k3" or kl.gradient != "value"


def _gain(surrogate: ClippedSurrogate, block: Block, at: Space) -> tuple[float, float, float]:
    """∑ w · min(ρ Â, clip(ρ) Â), and at how many tokens the clip is binding, low and high.

    Leaves − w Â ρ in ``gradient``, 0 where it is binding.
    """
    advantages, loose, spare = block.advantages, at.moved, at.minus_d
    weight = torch.empty_like(spare) if block.gradient is None else block.gradient
    torch.mul(at.share, block.corrections, out=weight).neg_()
    clipped = torch.clamp(at.rise, -surrogate.low, surrogate.high, out=spare)
    torch.addcmul(advantages, clipped, advantages, out=clipped)
    plain = torch.addcmul(advantages, at.rise, advantages, out=at.rise)
    torch.le(plain, clipped, out=loose)
    gain = -float(torch.dot(torch.minimum(plain, clipped, out=clipped), weight))
    if block.gradient is not None:
        block.gradient.mul_(plain.mul_(loose))
    up = torch.gt(advantages, 0, out=spare)
    ups, not_binding = at.log_ratios.sum(dim=1).tolist()  # of these two
    high = ups - float(torch.dot(up, loose))
    return gain, len(loose) - not_binding - high, high


def _seen(kl: KLTerm, excess: float, minus_d: Tensor | None, at: Space) -> tuple[float, float]:
    """∑ KL and ∑ s · KL."""
    total, value = excess, at.minus_d  # of k3
    if kl.estimator == "k1" and minus_d is not None:
        total = float(torch.neg(minus_d, out=value).sum())
    elif kl.estimator == "k2" and minus_d is not None:
        total = float(torch.mul(minus_d, minus_d, out=value).mul_(0.5).sum())
    return total, float(torch.dot(value, at.share))


def _pull(kl: KLTerm, kl_coef: float, minus_d: Tensor | None, block: Block, at: Space) -> bool:
    """Add β s c to ``gradient``; False where a sum to come is at its limit."""
    minus_c = at.grown if minus_d is None else minus_d
    if kl.gradient == "value" and kl.estimator == "k1":
        minus_c = at.grown.fill_(-1.0)
    elif kl.gradient == "sequence" and minus_d is not None and block.to_come is not None:
        ahead = torch.gt(at.share, 0, out=at.grown).mul_(block.to_come)
        low, high = torch.aminmax(ahead)
        limit = kl.clamp_to_come or LARGEST
        if not (-limit < float(low) and float(high) < limit):
            return False
        minus_c = minus_d.sub_(ahead)
    if block.gradient is not None:
        block.gradient.addcmul_(minus_c, at.share, value=-kl_coef)
    return True
