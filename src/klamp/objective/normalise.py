"""Stages that centre and scale scores by statistics of the batch, the group or the whole run."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objective.groups import (
    Groups,
    centred_in_groups,
    grouped,
    refuse_groups_of_one,
)
from klamp.objective.moments import (
    Moments,
    SegmentMoments,
    moments,
    plain,
    segment_moments,
)
from klamp.objective.settings import require_choice, require_number
from klamp.objective.stage import Staged
from klamp.types import ALONE, Batch, PerSequence, Workers

LEVELS = ("batch", "group", "running", None)

Running = tuple[tuple[int, Moments], ...]
"""Moments of every score so far, one entry per domain; domain 0 where the batch has none."""


@dataclass(frozen=True, kw_only=True)
class NormaliseScores:
    """(score − mean) / (std + eps), mean and std each of the batch, the group, the run, or none.

    ``running`` statistics include the batch they are applied to, and are kept per domain where the
    batch has domains.
    """

    mean: str | None = "group"
    std: str | None = "group"
    eps: float = 1e-6
    ddof: int = 1
    no_spread: str = "zero"
    """What scores of std 0 get: ``zero``, ``unscaled`` (score − mean), or ``divide`` (by eps)."""
    group_of_one: str = "refuse"
    """What a group of one gets from group statistics: ``refuse`` (an error), or ``zero``."""

    def __post_init__(self) -> None:
        require_choice(
            self,
            mean=LEVELS,
            std=LEVELS,
            ddof=(0, 1),
            no_spread=("zero", "unscaled", "divide"),
            group_of_one=("refuse", "zero"),
        )
        require_number(self, "eps", low=0.0)
        if self.eps == 0 and self.no_spread == "divide":
            raise ConfigError("NormaliseScores(no_spread='divide') needs eps > 0, got 0")

    def init(self) -> Running:
        """No score seen yet."""
        return ()

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: Running, workers: Workers = ALONE
    ) -> Staged:
        """Normalised scores, and the running moments that include this batch."""
        levels = sorted({level for level in (self.mean, self.std) if level is not None})
        groups = grouped(batch.groups) if "group" in levels else None
        if groups is not None and self.group_of_one == "refuse":
            stage = f"NormaliseScores(mean={self.mean!r}, std={self.std!r})"
            refuse_groups_of_one(batch.groups, stage, groups)
        if "running" in levels:
            memory = updated(memory, scores, batch.domains, workers)
        by = {
            level: statistics_of(level, scores, batch, groups, memory, workers) for level in levels
        }
        if self.mean is not None:
            scores = by[self.mean].centred(scores)
        for level in levels:
            scores = by[level].weighted(scores, self._weight(level, by[level].each, groups))
        return Staged(scores, memory)

    def _weight(self, level: str, m: SegmentMoments, groups: Groups | None) -> Tensor:
        """What the scores of each segment are multiplied with, for what is taken from them."""
        weight = torch.ones_like(m.mean)
        if level == self.std:
            weight = (m.std(self.ddof) + self.eps).clamp(min=1e-300).reciprocal()
            if self.no_spread == "unscaled":
                weight = torch.where(m.flat(), 1.0, weight)
        nothing = torch.zeros_like(weight, dtype=torch.bool)
        if level == self.mean or self.no_spread == "zero":
            nothing |= m.flat()
        if groups is not None and level == "group":
            nothing |= groups.sizes < 2
        return torch.where(nothing, 0.0, weight)


@dataclass(frozen=True, kw_only=True)
class ScaleScores:
    """score / std, no mean removed: of all scores so far (``running``), or a ``reference`` (trlx).

    The reference is ``std`` where given, else that of the first batch, over all workers. Without
    spread there is no scale yet, and scores pass as they are.
    """

    by: str = "running"
    std: float | None = None

    def __post_init__(self) -> None:
        require_choice(self, by=("running", "reference"))
        require_number(self, "std", above=0.0, optional=True)
        if self.std is not None and self.by != "reference":
            raise ConfigError(
                f"ScaleScores.std goes with by='reference', got std={self.std} by={self.by!r}"
            )

    def init(self) -> Running:
        """No score seen yet."""
        return ()

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: Running, workers: Workers = ALONE
    ) -> Staged:
        """Scaled scores, and the moments behind the scale."""
        if self.std is not None:
            return Staged(scores / self.std, memory)
        if self.by == "running":
            memory = updated(memory, scores, batch.domains, workers)
            by = running_statistics(memory, scores, batch.domains)
        else:
            first = moments(scores, ~scores.isnan(), workers)
            if not memory and not first.flat():  # without spread, the reference is yet to come
                memory = ((0, plain(first)),)
            by = running_statistics(memory, scores, None)
        scaled = scores / by.rows(by.each.std()).clamp(min=1e-300)
        return Staged(torch.where(by.rows(by.each.flat()), scores, scaled), memory)


class Statistics(NamedTuple):
    """Moments of each segment of the rows: all of them, the groups, or the domains."""

    each: SegmentMoments
    of_row: Tensor | None = None
    """Which segment a row belongs to. None: there is one."""
    less_mean: PerSequence | None = None
    """Scores less the mean of their segment, where that was made on the way."""

    def rows(self, x: Tensor) -> Tensor:
        """Something that each segment has, for its rows."""
        return x if self.of_row is None else x.index_select(0, self.of_row)

    def weighted(self, scores: PerSequence, weight: Tensor) -> PerSequence:
        """The scores times the weight of their segment."""
        return scores * weight if self.of_row is None else self.rows(weight).mul_(scores)

    def centred(self, scores: PerSequence) -> PerSequence:
        """The scores less the mean of their segment."""
        return scores - self.rows(self.each.mean) if self.less_mean is None else self.less_mean


def statistics_of(
    level: str,
    scores: PerSequence,
    batch: Batch,
    groups: Groups | None,
    memory: Running,
    workers: Workers,
) -> Statistics:
    """The moments that a level stands for."""
    if level == "running":
        return running_statistics(memory, scores, batch.domains)
    if groups is None or level == "batch":
        return Statistics(moments(scores, ~scores.isnan(), workers))
    each, less_mean = centred_in_groups(scores, groups)
    return Statistics(each, groups.of_row, less_mean)


def updated(
    memory: Running, scores: PerSequence, domains: Tensor | None, workers: Workers
) -> Running:
    """The running moments after this batch, on all workers."""
    ids = all_ids(_domains(scores, domains), workers)
    segment = torch.searchsorted(
        scores.new_tensor(ids, dtype=torch.long), _domains(scores, domains)
    )
    seen = segment_moments(scores, ~scores.isnan(), segment, len(ids), workers).each()
    merged = dict(memory)
    for domain, m in zip(ids, seen, strict=True):
        if m.count:
            merged[domain] = merged.get(domain, Moments()).merged(m)
    return tuple(sorted(merged.items()))


def running_statistics(memory: Running, scores: PerSequence, domains: Tensor | None) -> Statistics:
    """The running moments of each row's domain."""
    here = _domains(scores, domains)
    known = {**{int(d): Moments() for d in here.unique()}, **dict(memory)}
    ids = sorted(known)
    rows = scores.new_tensor([[known[d].count, known[d].mean, known[d].m2] for d in ids]).view(
        -1, 3
    )
    segment = torch.searchsorted(scores.new_tensor(ids, dtype=torch.long), here)
    return Statistics(SegmentMoments(*rows.unbind(1)), segment)


def all_ids(ids: Tensor, workers: Workers) -> list[int]:
    """The distinct ids of all workers in order: the largest that is left, until none is."""
    left, found = sorted({int(i) for i in ids.unique()}), list[int]()
    nothing = torch.iinfo(torch.long).min
    while True:
        top = left[-1] if left else nothing
        top = int(workers.max(torch.tensor(top, device=ids.device)))
        if top == nothing:
            return found[::-1]
        found.append(top)
        left = [i for i in left if i < top]


def _domains(scores: PerSequence, domains: Tensor | None) -> Tensor:
    if domains is None:
        return torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    return domains.to(scores.device, torch.long)
