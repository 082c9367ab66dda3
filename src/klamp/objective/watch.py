"""What a batch shows before anything is made of it: its KL, its scores, its value function."""

from typing import NamedTuple

import torch
from torch import Tensor

from klamp.objective.kl import KLTerm
from klamp.objective.metrics import Metric, mean_of
from klamp.objective.moments import moments, wide
from klamp.types import Batch, PerSequence, PerToken, TokenMask, Workers


class ObservedKL(NamedTuple):
    """KL(π_old ‖ π_ref): per token as estimated, and as the controller watches it."""

    tokens: PerToken
    clamped: TokenMask
    watched: float
    per_token: float
    per_sequence: float


def observe_kl(term: KLTerm, batch: Batch, workers: Workers) -> ObservedKL:
    """The KL of the old policy over all workers, in every unit (one packed sum)."""
    tokens, clamped, _ = term.value(term.estimator, batch, batch.mask)
    seen = (
        tokens if term.watched == term.estimator else term.value(term.watched, batch, batch.mask)[0]
    )
    lengths = batch.mask.sum(dim=-1)
    rows = wide(seen).sum(dim=-1)
    each = rows / wide(lengths).clamp(min=1.0)
    counts = [lengths.sum().to(rows), (lengths > 0).sum().to(rows)]
    n, s, total, of_means = workers.sum(torch.stack([*counts, rows.sum(), each.sum()])).tolist()
    units = {
        "token_mean": total / max(n, 1.0),
        "sequence_sum": total / max(s, 1.0),
        "sequence_mean": of_means / max(s, 1.0),
    }
    return ObservedKL(
        tokens, clamped, units[term.watch_reduction], units["token_mean"], units["sequence_sum"]
    )


def score_metrics(raw: PerSequence, shaped: PerSequence) -> dict[str, Metric]:
    """Raw and shaped scores side by side."""
    return {
        "critic/score/mean": mean_of(raw, ~raw.isnan()),
        "critic/shaped_score/mean": mean_of(shaped, ~shaped.isnan()),
    }


def advantage_metrics(advantages: PerToken, mask: TokenMask) -> dict[str, Metric]:
    """The mean, which should be near 0, and the mean size."""
    return {
        "critic/advantages/mean": mean_of(advantages, mask),
        "critic/advantages/abs_mean": mean_of(advantages.abs(), mask),
    }


def explained_variance(
    values: PerToken, returns: PerToken, mask: TokenMask, workers: Workers
) -> Metric:
    """1 − Var(R − V) / Var(R): 1 for a perfect value function, 0 for a constant one."""
    of_returns = moments(returns, mask, workers)
    of_errors = moments(wide(returns) - wide(values), mask, workers)
    share: Tensor = 1.0 - of_errors.m2 / of_returns.m2.clamp(min=1e-30)
    share = torch.where(of_returns.flat(), torch.zeros_like(share), share.clamp(min=-1e6))
    return Metric(share, torch.ones_like(share))
