"""Sampler/trainer mismatch: what a token is worth when the engine's policy μ is not π_old.

w = π_old / μ per token, or its geometric mean over the response. One statistic, one action and one
rule for the denominator; which of the two policies to blame is left to the metrics.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from klamp.errors import ConfigError
from klamp.objective.logratio import RATIO_LIMIT, excess, log_ratio, ratio
from klamp.objective.metrics import Metric, count_of, max_of, mean_of
from klamp.objective.moments import wide
from klamp.objective.settings import require_choice, require_number
from klamp.types import ALONE, Batch, PerToken, TokenMask, Workers


class Corrected(NamedTuple):
    """Weights of the policy term, which tokens the filter keeps, and what to watch."""

    weights: PerToken
    keep: TokenMask
    metrics: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Truncate or mask by w = π_old/μ: TIS, IcePop, sequence masks.

    ======== ======== =======================================================================
    level    action
    ======== ======== =======================================================================
    token    truncate w clamped to [low, high] (truncated importance sampling)
    token    mask     w where low ≤ w ≤ high, else 0 (IcePop)
    sequence truncate the response's geometric mean of w, clamped to [low, high]
    sequence mask     w clamped to [low, high] where the geometric mean lies in it, else 0
    ======== ======== =======================================================================

    Without ``Batch.sampler_logprobs`` sampler and trainer are the same, and every weight is 1.
    """

    level: str = "token"
    action: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    floor: float | None = None
    """With ``mask``: no weight that is kept is smaller than this; None = low."""
    cap: float | None = None
    """With ``mask``: no weight is larger than this; None = high."""
    weight: str = "token"
    """With ``mask``: what is kept weighs by its own w, or by that of its ``sequence``."""
    clamp_log_ratio: float = RATIO_LIMIT
    """log w is clamped to ± this before anything is made of it."""
    denominator: str = "fixed"
    """``fixed``: a masked token keeps its place in the average; ``shrink``: it leaves the mask."""

    def __post_init__(self) -> None:
        require_choice(
            self,
            level=("token", "sequence"),
            action=("truncate", "mask"),
            weight=("token", "sequence"),
            denominator=("fixed", "shrink"),
        )
        require_number(self, "low", low=0.0)
        require_number(self, "high", above=0.0)
        require_number(self, "floor", "cap", low=0.0, optional=True)
        require_number(self, "clamp_log_ratio", above=0.0, high=RATIO_LIMIT)
        if self.low >= self.high:
            raise ConfigError(f"Correction needs low < high, got low={self.low} high={self.high}")
        masks_only = (self.floor, self.cap, self.weight, self.denominator)
        if self.action == "truncate" and masks_only != (None, None, "token", "fixed"):
            raise ConfigError(
                "Correction(action='truncate') clamps to [low, high] and removes nothing, got "
                f"floor={self.floor} cap={self.cap} weight={self.weight!r} "
                f"denominator={self.denominator!r}; leave these as they are or use action='mask'"
            )

    def __call__(self, batch: Batch, workers: Workers = ALONE) -> Corrected:
        """Each token's weight, detached."""
        mask = batch.mask
        if batch.sampler_logprobs is None:
            ones = torch.ones_like(mask, dtype=torch.float32)
            return Corrected(ones, torch.ones_like(mask), {})
        own, whole = self._ratios(batch, batch.sampler_logprobs)
        statistic = own if self.level == "token" else whole
        outside = (statistic < self.low) | (statistic > self.high)
        if self.action == "truncate":
            weights, keep = statistic.clamp(self.low, self.high), torch.ones_like(mask)
        else:
            w = own if self.weight == "token" else whole
            floor = self.low if self.floor is None else self.floor
            cap = self.high if self.cap is None else self.cap
            weights, keep = torch.where(outside, 0.0, w.clamp(floor, cap)), ~outside
        name = "truncated" if self.action == "truncate" else "masked"
        metrics = {
            f"actor/sampler_{name}_frac": mean_of(outside, mask),
            "signal/tokens_removed_by_correction": count_of(mask & ~keep),
        }
        return Corrected(weights, keep, {**mismatch(batch, workers), **metrics})

    def _ratios(self, batch: Batch, sampler: PerToken) -> tuple[PerToken, PerToken]:
        """w of each token, and the geometric mean of its response."""
        mask, c = batch.mask, self.clamp_log_ratio
        log_w = log_ratio(batch.old_logprobs, sampler, mask, bounds=(-c, c)).value
        length = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        mean = (log_w.sum(dim=-1, keepdim=True) / length).expand_as(log_w)
        return ratio(log_w), ratio(mean)


def mismatch(batch: Batch, workers: Workers = ALONE) -> dict[str, Metric]:
    """How far the sampler is from the trainer, measured before any filter can hide it."""
    if batch.sampler_logprobs is None:
        return {}
    bounds = (-RATIO_LIMIT, RATIO_LIMIT)
    mask = batch.mask
    log_w = log_ratio(batch.old_logprobs, batch.sampler_logprobs, mask, bounds=bounds).value
    w = ratio(log_w)
    return {
        # Samples are the sampler's, so excess(log π_old/μ) is k3 of KL(μ ‖ π_old).
        "actor/sampler_kl": mean_of(excess(log_w), mask),
        "actor/sampler_ratio_max": max_of(w, mask),
        "actor/sampler_ess": effective_sample_size(w, mask, workers),
    }


def effective_sample_size(w: PerToken, mask: TokenMask, workers: Workers = ALONE) -> Metric:
    """(∑w)² / (n ∑w²) over the active tokens of all workers: 1 when all weigh the same."""
    x = torch.where(mask.to(wide(w).device), wide(w), 0.0)
    n, first, second = workers.sum(
        torch.stack([mask.sum().to(x), x.sum(), x.square().sum()])
    ).unbind()
    share = first.square() / (n * second).clamp(min=1e-300)
    return Metric(share, torch.ones_like(share))
