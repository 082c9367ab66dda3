"""An ordinary block of tokens: value, metrics and gradient of the policy and KL terms at once.

    ∂/∂log π  =  − w Â ρ [not clipped]  +  β s c,     w = share · correction,  s = share,

with c the coefficient of the KL term's gradient. Ordinary is a block in which no clamp changes
anything and every number is finite, also those that are masked: multiplying by 0 is six times as
fast as ``where``, and NaN survives it and is seen.

In numpy (``arrays.py`` says why), on the tensors' own memory.
"""

import math
from typing import NamedTuple

from klamp.arrays import Array, np
from klamp.objective.kl import KLTerm
from klamp.objective.logratio import EXCESS_LIMIT, LARGEST, RATIO_LIMIT, SMALL, growth
from klamp.objective.losses import ClippedSurrogate
from klamp.objective.sums import Sums

ROWS = 6


class Block(NamedTuple):
    """Some tokens in a row."""

    logprobs: Array
    old: Array
    advantages: Array
    corrections: Array
    shares: Array
    mask: Array
    ref: Array | None
    to_come: Array | None
    gradient: Array | None
    """Where it goes."""


class Space(NamedTuple):
    """Rows of scratch as long as a block, each for one thing after the other, some together."""

    active: Array
    """1 where a token has a share, else 0."""
    share: Array
    grown: Array
    """π_ref/π − 1."""
    rise: Array
    """ρ − 1; then ρ; then ρ Â."""
    minus_d: Array
    """log π_ref/π; then eˣ − 1 − x of it; then spare."""
    moved: Array
    """log ρ; then eˣ − 1 − x of it; then 1 where the clip is not binding."""
    rises: Array
    log_ratios: Array
    summed: Array
    on: Array
    """Where a token has a share; then where the clip is not binding."""
    up: Array


def space(rows: Array, marks: Array) -> Space:
    """The rows of [ROWS, width] numbers and [2, width] bools by what they are used for."""
    together = {"rises": rows[2:4], "log_ratios": rows[4:6], "summed": rows[3:6]}
    return Space(*rows, **together, on=marks[0], up=marks[1])


def ordinary(
    surrogate: ClippedSurrogate, kl: KLTerm | None, kl_coef: float, block: Block, at: Space
) -> Sums | None:
    """The block's sums, its gradient written; None where a clamp or worse is at work."""
    tokens = _log_ratios(block, at)
    least, low = at.log_ratios.min(axis=1).tolist()
    most, high = at.log_ratios.max(axis=1).tolist()
    if not _unclamped(surrogate, kl, (least, most), (low, high)):
        return None
    near = max(-least, -low, most, high) < SMALL
    if tokens < len(at.on) and not low < 0.0 < high:  # a masked token's 0 is no extreme
        low, high = _ends(at.moved[at.on])
    minus_d = at.minus_d.copy() if kl is not None and _needs_log_ratio(kl) else None
    growth(at.log_ratios, near=near, out=at.rises)
    rise, excess, moved = np.dot(at.summed, at.active).tolist()
    kl_sum, kl_share = (0.0, 0.0) if kl is None else _seen(kl, excess, minus_d, at)
    gain, clipped, clipped_high = _gain(surrogate, block, at)
    if not _pull(kl, kl_coef, minus_d, block, at) or not math.isfinite(gain):
        return None
    return Sums(
        tokens=tokens,
        gain=gain,
        rise=rise,
        moved=moved,
        clipped=clipped,
        clipped_high=clipped_high,
        kl_share=kl_share,
        kl=kl_sum,
        low=math.exp(low),
        high=math.exp(high),
    )


def _log_ratios(block: Block, at: Space) -> int:
    """Write ``active``, ``share`` and both log-ratios, 0 where not active; how many tokens are."""
    np.greater(block.shares, 0, out=at.on)
    np.logical_and(at.on, block.mask, out=at.on)
    np.copyto(at.active, at.on)  # as numbers: a product with bools is slow
    np.multiply(block.shares, at.active, out=at.share)
    np.subtract(block.logprobs, block.old, out=at.moved)
    np.multiply(at.moved, at.active, out=at.moved)
    if block.ref is None:
        at.minus_d.fill(0.0)
    else:
        np.subtract(block.ref, block.logprobs, out=at.minus_d)
        np.multiply(at.minus_d, at.active, out=at.minus_d)
    return int(np.count_nonzero(at.on))


def _unclamped(
    surrogate: ClippedSurrogate,
    kl: KLTerm | None,
    of_minus_d: tuple[float, float],
    of_log_rho: tuple[float, float],
) -> bool:
    """Whether all log-ratios are where nothing is clamped; NaN is not."""
    limit = min(surrogate.clamp_log_ratio, RATIO_LIMIT)
    dual = math.inf if surrogate.dual is None else math.log(surrogate.dual)
    inside = -limit <= of_log_rho[0] and of_log_rho[1] <= min(limit, dual)
    if kl is None or not inside:
        return inside
    (a, b), (c, d) = kl.bounds[kl.estimator], kl.bounds["coefficient"]
    least, most = of_minus_d
    return -min(b, d, LARGEST) <= least and most <= -max(a, c, -EXCESS_LIMIT)


def _ends(x: Array) -> tuple[float, float]:
    """The least and the largest."""
    return (float(x.min()), float(x.max())) if len(x) else (math.inf, -math.inf)


def _needs_log_ratio(kl: KLTerm) -> bool:
    """k3 with its own gradient is made of e⁻ᵈ − 1 alone; all else also of d."""
    return kl.estimator != "k3" or kl.gradient != "value"


def _gain(surrogate: ClippedSurrogate, block: Block, at: Space) -> tuple[float, int, int]:
    """∑ w · min(ρ Â, clip(ρ) Â), and at how many tokens the clip is binding, and which high.

    Leaves w Â ρ in ``gradient``, 0 where it is binding.
    """
    advantages, loose, up = block.advantages, at.on, at.up
    weight = np.empty_like(at.share) if block.gradient is None else block.gradient
    np.multiply(at.share, block.corrections, out=weight)
    rho = np.add(at.rise, 1.0, out=at.rise)
    clipped = rho.clip(1.0 - surrogate.low, 1.0 + surrogate.high, out=at.minus_d)
    clipped *= advantages
    plain = np.multiply(rho, advantages, out=rho)
    np.less_equal(plain, clipped, out=loose)
    gain = float(np.dot(np.minimum(plain, clipped, out=clipped), weight))
    gain = gain if math.isfinite(np.dot(plain, weight)) else math.nan  # where it is not, ∞ · 0
    np.greater(np.greater(advantages, 0, out=up), loose, out=up)  # up and not loose
    binding, high = len(loose) - int(np.count_nonzero(loose)), int(np.count_nonzero(up))
    if block.gradient is not None:
        np.copyto(at.moved, loose)
        plain *= at.moved
        weight *= plain
    return gain, binding, high


def _seen(kl: KLTerm, excess: float, minus_d: Array | None, at: Space) -> tuple[float, float]:
    """∑ KL and ∑ s · KL."""
    total, value = excess, at.minus_d  # of k3
    if kl.estimator == "k1" and minus_d is not None:
        total = float(np.negative(minus_d, out=value).sum())
    elif kl.estimator == "k2" and minus_d is not None:
        np.multiply(minus_d, minus_d, out=value)
        value *= 0.5
        total = float(value.sum())
    return total, float(np.dot(value, at.share))


def _pull(
    kl: KLTerm | None, kl_coef: float, minus_d: Array | None, block: Block, at: Space
) -> bool:
    """Turn ``gradient`` into β s c − it; False where a sum to come is at its limit."""
    if kl is None:
        if block.gradient is not None:
            np.negative(block.gradient, out=block.gradient)
        return True
    minus_c = at.grown if minus_d is None else minus_d
    if kl.gradient == "value" and kl.estimator == "k1":
        minus_c = at.grown
        minus_c.fill(-1.0)
    elif kl.gradient == "sequence" and block.to_come is not None:
        ahead = np.multiply(block.to_come, at.active, out=at.grown)
        low, high = _ends(ahead)
        limit = kl.clamp_to_come or LARGEST
        if not (-limit < low and high < limit):
            return False
        minus_c -= ahead
    if block.gradient is not None:
        minus_c *= at.share
        minus_c *= -kl_coef
        np.subtract(minus_c, block.gradient, out=block.gradient)
    return True
