"""Groups by id, never by position: statistics of siblings, and how hard their prompt is.

Sequences sampled from one prompt share an id. Ids are arbitrary, groups may be ragged and in any
order; a group lives on one worker.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.errors import ConfigError, DataError
from klamp.objective.metrics import Metric, count_of, mean_of
from klamp.objective.moments import SegmentMoments, centred_moments, wide
from klamp.objective.settings import require_choice, require_kind, require_number
from klamp.types import (
    ALONE,
    Batch,
    GroupIds,
    PerSequence,
    PerToken,
    RowMask,
    TokenMask,
    Workers,
)

WIDEST = 4
"""Ids spread over up to so many numbers per row are counted in a table, others are sorted."""


class Groups(NamedTuple):
    """Which group each row belongs to, numbered from 0, and how many rows each has."""

    of_row: Tensor
    sizes: Tensor


def grouped(groups: GroupIds) -> Groups:
    """Ids to consecutive numbers, in the order of the ids."""
    low, high = torch.stack(torch.aminmax(groups)).tolist() if len(groups) else (0, 0)
    if high - low >= WIDEST * len(groups):
        _, of_row, sizes = groups.unique(return_inverse=True, return_counts=True)
        return Groups(of_row, sizes)
    # Ids that are close together need no sorting: they are counted, and the gaps closed.
    of_row = groups.long() - low if low else groups.long()
    sizes = torch.bincount(of_row)
    if int(sizes.min()):
        return Groups(of_row, sizes)
    there = sizes > 0
    return Groups((there.cumsum(0) - 1).index_select(0, of_row), sizes[there])


def group_moments(scores: PerSequence, groups: Groups) -> SegmentMoments:
    """Count, mean and squared deviations of each group's scores; NaN is no score."""
    return centred_in_groups(scores, groups)[0]


def centred_in_groups(scores: PerSequence, groups: Groups) -> tuple[SegmentMoments, PerSequence]:
    """``group_moments``, and each score less the mean of its group."""
    of_row, sizes = groups
    # One NaN makes the sum NaN: cheaper than to look at each, in a batch that has none.
    valid = None if scores.sum().isfinite() else ~scores.isnan()
    return centred_moments(scores, valid, of_row, len(sizes), sizes=sizes)


def leave_one_out_by_rank(x: PerToken, groups: GroupIds, workers: Workers = ALONE) -> PerToken:
    """For each row the mean of its siblings' x, column by column; a lone row's siblings are all.

    Columns are ranks among active tokens; a response that has ended counts as 0 there.
    """
    of_row, sizes = grouped(groups)
    w = wide(x)
    of_row, sizes = of_row.to(w.device), sizes.to(w.device)
    totals = w.new_zeros(len(sizes), w.shape[1]).index_add(0, of_row, w)
    others = sizes[of_row][:, None] - 1
    siblings = (totals[of_row] - w) / others.clamp(min=1)
    width = int(workers.max(torch.tensor(w.shape[1], device=w.device)))
    everyone = torch.cat([w.sum(dim=0), w.new_zeros(width - w.shape[1]), w.new_tensor([len(w)])])
    everyone = workers.sum(everyone)
    rest = (everyone[: w.shape[1]] - w) / (everyone[-1] - 1).clamp(min=1)
    return torch.where(others > 0, siblings, rest).to(x)


def refuse_groups_of_one(groups: GroupIds, stage: str, known: Groups | None = None) -> None:
    """A lone sample has no siblings to be compared with."""
    of_row, sizes = grouped(groups) if known is None else known
    alone = sizes < 2
    if alone.any():
        row = int(alone[of_row].nonzero()[0])
        raise DataError(
            f"{stage} needs at least 2 samples per group, got group {int(groups[row])} (row {row})"
            " with 1: its baseline would be the score itself. Raise samples_per_prompt, or set "
            'group_of_one="zero"'
        )


class Filtered(NamedTuple):
    """What a difficulty setting makes of a batch."""

    keep: RowMask
    weights: PerSequence
    metrics: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Which prompts are worth learning from, and how much.

    Mask: keep a group iff low < mean raw score < high. Weights: 0.5 + 1.5 · difficulty, where
    difficulty ∈ [0, 1] is given per sample or is 1 − the group's mean raw score; and for length
    1.5 − (length − shortest) / (longest − shortest). Their product has mean 1 over the whole batch.
    A group of one is kept: one sample does not tell how hard a prompt is.
    """

    low: float | None = 0.1
    high: float | None = 0.95
    drop_truncated: bool = False
    """Also remove responses that hit the length limit (DAPO's overlong filter)."""
    weigh_difficulty: bool = False
    weigh_length: bool = False
    weights_on: str = "loss"
    """``loss``: every term of the row; ``policy``: the policy term alone, as ROLL does."""
    denominator: str = "fixed"
    """``fixed``: filtered rows still count in the average; ``shrink``: they leave the mask."""

    def __post_init__(self) -> None:
        require_number(self, "low", "high", optional=True)
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(f"Difficulty needs low < high, got low={self.low} high={self.high}")
        require_choice(self, weights_on=("loss", "policy"), denominator=("fixed", "shrink"))
        require_kind(self, drop_truncated=(bool,), weigh_difficulty=(bool,), weigh_length=(bool,))

    def __call__(self, scores: PerSequence, batch: Batch, workers: Workers = ALONE) -> Filtered:
        """Which rows stay, and weights of mean 1 over the batch of all workers; raw scores."""
        groups = grouped(batch.groups)
        m = group_moments(scores, groups)
        mean = torch.where(m.count > 0, m.mean, torch.nan)[groups.of_row]
        removed = torch.zeros_like(mean, dtype=torch.bool)
        rounded = mean.to(batch.scores.dtype)  # as the scores are: 0.1 in float32 is not 0.1
        if self.low is not None:
            removed |= rounded <= self.low
        if self.high is not None:
            removed |= rounded >= self.high
        removed &= groups.sizes[groups.of_row] > 1
        truncated = self._truncated(batch)
        weights = self._weights(batch, mean, workers)
        counted = {
            "signal/removed_by_difficulty": count_of(removed),
            "signal/removed_as_truncated": count_of(truncated),
        }
        return Filtered(~(removed | truncated), weights, counted)

    def _truncated(self, batch: Batch) -> RowMask:
        if not self.drop_truncated:
            return torch.zeros_like(batch.groups, dtype=torch.bool)
        if batch.truncated is None:
            raise DataError(
                "Difficulty.drop_truncated needs Batch.truncated, got None; say which responses "
                "hit the length limit"
            )
        return batch.truncated

    def _weights(self, batch: Batch, mean: PerSequence, workers: Workers) -> PerSequence:
        weights = torch.ones_like(mean)
        if self.weigh_difficulty:
            given = batch.difficulty
            hard = (1.0 - mean if given is None else wide(given)).clamp(0.0, 1.0)
            weights = weights * (0.5 + 1.5 * hard).nan_to_num(nan=1.0)  # unknown: weighs 1
        if self.weigh_length:
            weights = weights * length_weights(batch.mask, workers).to(weights)
        count, total = workers.sum(torch.stack([torch.ones_like(weights).sum(), weights.sum()]))
        return weights * (count / total.clamp(min=1e-8))


def length_weights(mask: TokenMask, workers: Workers = ALONE) -> PerSequence:
    """1.5 for the shortest response of the batch down to 0.5 for the longest."""
    lengths = wide(mask.sum(dim=-1))
    ends = [lengths.max(), -lengths.min()] if len(lengths) else [lengths.new_tensor(-torch.inf)] * 2
    longest, shortest = workers.max(torch.stack(ends))
    return 1.5 - (lengths + shortest) / (longest + shortest).clamp(min=1.0)


def signal_report(scores: PerSequence, groups: GroupIds, keep: RowMask) -> dict[str, Metric]:
    """How much of the batch can teach anything: raw scores with spread, after the filters."""
    g = grouped(groups)
    flat = group_moments(scores, g).flat()
    kept = torch.zeros_like(g.sizes).index_add(0, g.of_row, keep.to(g.sizes)) > 0
    every = torch.ones_like(flat)
    return {
        "signal/groups": count_of(every),
        "signal/groups_effective": count_of(~flat & kept),
        "signal/groups_effective_frac": mean_of(~flat & kept, every),
        "signal/groups_without_spread": count_of(flat),
        "signal/samples": count_of(torch.ones_like(keep)),
        "signal/missing_scores": count_of(scores.isnan()),
    }
