"""What the one-pass forms of the policy and KL terms count, and the loss and metrics made of it."""

import math
from typing import NamedTuple

from klamp.objective.metrics import MAX, MIN, SUM, Metric, Number


class Sums(NamedTuple):
    """Sums over active tokens: plain numbers, or 0-dim tensors where nobody has looked at them."""

    tokens: Number = 0.0
    gain: Number = 0.0
    """∑ w · min(ρ Â, clip(ρ) Â)."""
    rise: Number = 0.0
    """∑ (ρ − 1)."""
    moved: Number = 0.0
    """∑ (ρ − 1 − log ρ)."""
    clipped: Number = 0.0
    clipped_high: Number = 0.0
    dual: Number = 0.0
    clamped: Number = 0.0
    nonfinite: Number = 0.0
    kl_share: Number = 0.0
    """∑ s · KL."""
    kl: Number = 0.0
    kl_clamped: Number = 0.0
    kl_bounded: Number = 0.0
    low: Number = math.inf
    """The smallest ρ."""
    high: Number = -math.inf


def plus(a: Sums, b: Sums) -> Sums:
    """Of two parts; of numbers that were looked at."""
    sums = [float(x) + float(y) for x, y in zip(a[:-2], b[:-2], strict=True)]
    low, high = min(float(a.low), float(b.low)), max(float(a.high), float(b.high))
    return Sums(*sums, low=low, high=high)


def report(s: Sums, kl_coef: float, *, with_kl: bool) -> tuple[Number, dict[str, Metric]]:
    """The loss and metrics of ``terms.policy_term`` and ``terms.kl_term``."""
    tokens = s.tokens
    metrics = {
        "actor/pg_loss": Metric(-s.gain, 1.0, SUM),
        "actor/ratio_mean": Metric(tokens + s.rise, tokens),
        "actor/ratio_max": Metric(s.high, tokens, MAX),
        "actor/ratio_min": Metric(s.low, tokens, MIN),
        "actor/clip_frac": Metric(s.clipped, tokens),
        "actor/clip_frac_low": Metric(s.clipped - s.clipped_high, tokens),
        "actor/clip_frac_high": Metric(s.clipped_high, tokens),
        "actor/dual_clip_frac": Metric(s.dual, tokens),
        "actor/ratio_clamp_frac": Metric(s.clamped, tokens),
        "actor/old_kl": Metric(s.moved, tokens),
        "actor/nonfinite_tokens": Metric(s.nonfinite, 1.0, SUM),
    }
    if not with_kl:
        return -s.gain, metrics
    penalty = kl_coef * s.kl_share
    metrics |= {
        "actor/kl_loss": Metric(penalty, 1.0, SUM),
        "actor/kl": Metric(s.kl, tokens),
        "actor/kl_clamp_frac": Metric(s.kl_clamped, tokens),
        "actor/kl_coef_clamp_frac": Metric(s.kl_bounded, tokens),
    }
    return penalty - s.gain, metrics
