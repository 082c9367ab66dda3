"""KL estimators: what one sampled token says about KL(π ‖ π_ref).

With x ~ π and d = log π(x) − log π_ref(x). As values, k1 and k3 have the KL as their expectation,
k2 agrees with it to second order, abs and k3_reversed estimate something else. See Schulman,
http://joschu.net/blog/kl-approx.html. Which *gradient* goes with a value is ``KLTerm``'s business.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from klamp.objective.logratio import EXCESS_LIMIT, LARGEST, Bounds, excess, log_ratio
from klamp.types import PerToken

OF_LOG_RATIO: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: excess(-d),
    "abs": torch.abs,
    "k3_reversed": lambda d: excess(d),
}


def k1(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """d: unbiased, high variance, may be negative."""
    return log_ratio(logprobs, ref_logprobs).value


def k2(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """½ d²: biased, low variance; its gradient is that of one token's KL."""
    return OF_LOG_RATIO["k2"](k1(logprobs, ref_logprobs))


def k3(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """e⁻ᵈ − 1 + d: unbiased and never negative."""
    return OF_LOG_RATIO["k3"](k1(logprobs, ref_logprobs))


def absolute(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """|d|: no divergence, but some systems penalise it."""
    return OF_LOG_RATIO["abs"](k1(logprobs, ref_logprobs))


def k3_reversed(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """eᵈ − 1 − d: what trlx computes. Under π its expectation is χ²(π‖ref) − KL, not the KL."""
    return OF_LOG_RATIO["k3_reversed"](k1(logprobs, ref_logprobs))


ESTIMATORS: dict[str, Callable[[PerToken, PerToken], PerToken]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k3_reversed": k3_reversed,
}


def clamped_estimate(
    estimator: str, logprobs: PerToken, ref_logprobs: PerToken, *, clamp_value: float | None = None
) -> PerToken:
    """An estimator whose value is clamped to ± clamp_value; no gradient where it is."""
    bounds = value_bounds(estimator, clamp_value)
    return OF_LOG_RATIO[estimator](log_ratio(logprobs, ref_logprobs, bounds=bounds).value)


def clamp_bounds(
    estimator: str, clamp_log_ratio: float | None, clamp_value: float | None
) -> Bounds:
    """The interval of d in which neither clamp, nor the range of exp, changes anything."""
    low, high = value_bounds(estimator, clamp_value)
    c = LARGEST if clamp_log_ratio is None else clamp_log_ratio
    return max(low, -c), min(high, c)


def value_bounds(estimator: str, clamp: float | None) -> Bounds:
    """The d at which the estimator reaches ± clamp; without one, where it would leave float32.

    Every estimator is monotone on either side of d = 0, so clamping its value is clamping d: the
    same numbers and the same gradient, with nothing to overflow in between.
    """
    if clamp is None:
        low = -EXCESS_LIMIT if estimator == "k3" else -LARGEST
        high = EXCESS_LIMIT if estimator == "k3_reversed" else LARGEST
        return low, high
    if estimator in ("k1", "abs"):
        return -clamp, clamp
    if estimator == "k2":
        return -math.sqrt(2 * clamp), math.sqrt(2 * clamp)
    steep = _root(lambda x: math.expm1(x) - x, clamp, EXCESS_LIMIT)
    flat = _root(lambda x: math.expm1(-x) + x, clamp, clamp + 1.0)
    return (-steep, flat) if estimator == "k3" else (-flat, steep)


def _root(f: Callable[[float], float], value: float, high: float) -> float:
    """The x in [0, high] at which the increasing f reaches the value, or high."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < value else (low, middle)
    return high
