"""Score stages: clip, penalise, combine, compare with siblings.

A pipeline is a tuple of stages, so that the order of clipping and normalising is visible where the
pipeline is written. What a stage is stands in ``stage.py``; those that normalise in
``normalise.py``.
"""

from dataclasses import dataclass
from typing import Any

import torch

from klamp.errors import ConfigError, DataError
from klamp.objective.groups import group_moments, grouped, refuse_groups_of_one
from klamp.objective.metrics import mean_of
from klamp.objective.moments import wide
from klamp.objective.normalise import NormaliseScores as NormaliseScores
from klamp.objective.normalise import ScaleScores as ScaleScores
from klamp.objective.settings import is_finite, require_choice, require_kind, require_number
from klamp.objective.stage import ScoreStage as ScoreStage
from klamp.objective.stage import Staged
from klamp.types import ALONE, Batch, PerSequence, Workers


@dataclass(frozen=True, kw_only=True)
class ClipScores:
    """Clamp every score to [low, high]; counts what it changed in critic/reward_clip_frac."""

    low: float
    high: float

    def __post_init__(self) -> None:
        require_number(self, "low", "high")
        if not self.low < self.high:
            raise ConfigError(f"ClipScores needs low < high, got low={self.low} high={self.high}")

    def init(self) -> None:
        """Nothing to remember."""

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: None = None, workers: Workers = ALONE
    ) -> Staged:
        """Clamped scores."""
        outside = (scores < self.low) | (scores > self.high)
        counted = {"critic/reward_clip_frac": mean_of(outside, ~scores.isnan())}
        return Staged(scores.clamp(self.low, self.high), None, counted)


@dataclass(frozen=True, kw_only=True)
class SubtractOthersMean:
    """score − mean of the other scores of its group = (score − mean) · n / (n − 1) (RLOO)."""

    group_of_one: str = "refuse"
    """What a group of one gets: ``refuse`` (an error), or ``zero``."""

    def __post_init__(self) -> None:
        require_choice(self, group_of_one=("refuse", "zero"))

    def init(self) -> None:
        """Nothing to remember."""

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: None = None, workers: Workers = ALONE
    ) -> Staged:
        """Scores relative to their siblings."""
        if self.group_of_one == "refuse":
            refuse_groups_of_one(batch.groups, "SubtractOthersMean")
        groups = grouped(batch.groups)
        m = group_moments(scores, groups)
        scale = m.count / (m.count - 1).clamp(min=1.0)
        apart = (scores - m.mean[groups.of_row]) * scale[groups.of_row]
        return Staged(torch.where(m.flat()[groups.of_row], 0.0 * scores, apart))


@dataclass(frozen=True, kw_only=True)
class PenaliseOverlong:
    """score − factor · min(length − (max_length − buffer), buffer) / buffer, where that is > 0.

    Length is the number of active tokens. Reference: DAPO, arXiv 2503.14476, eq. 13.
    """

    max_length: int
    buffer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_kind(self, max_length=(int,), buffer=(int,))
        if not 0 < self.buffer <= self.max_length:
            raise ConfigError(
                f"PenaliseOverlong needs 0 < buffer <= max_length, got buffer={self.buffer} "
                f"max_length={self.max_length}"
            )
        require_number(self, "factor", low=0.0)

    def init(self) -> None:
        """Nothing to remember."""

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: None = None, workers: Workers = ALONE
    ) -> Staged:
        """Scores less the penalty."""
        excess = wide(batch.mask.sum(dim=-1)) - (self.max_length - self.buffer)
        penalty = self.factor * excess.clamp(0, self.buffer) / self.buffer
        counted = {"critic/overlong_frac": mean_of(penalty > 0, torch.ones_like(excess > 0))}
        return Staged(scores - penalty, None, counted)


@dataclass(frozen=True, kw_only=True)
class PenaliseTruncated:
    """A response that hit the length limit: score · coef for coef ∈ [0, 1], coef itself below 0."""

    coef: float

    def __post_init__(self) -> None:
        hint = "0 to 1 scales the score, a negative value replaces it"
        require_number(self, "coef", high=1.0, hint=hint)

    def init(self) -> None:
        """Nothing to remember."""

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: None = None, workers: Workers = ALONE
    ) -> Staged:
        """Scores with truncated responses penalised; a missing score stays missing."""
        if batch.truncated is None:
            raise DataError(
                "PenaliseTruncated needs Batch.truncated, got None; say which responses hit the "
                "length limit"
            )
        penalised = scores * self.coef if self.coef >= 0 else 0.0 * scores + self.coef
        counted = {
            "critic/truncated_frac": mean_of(batch.truncated, torch.ones_like(batch.truncated))
        }
        return Staged(torch.where(batch.truncated, penalised, scores), None, counted)


@dataclass(frozen=True, kw_only=True)
class CombineScores:
    """∑ₖ weightₖ · componentₖ, each component normalised first where ``normalise`` is set (GDPO).

    Takes ``Batch.components`` in place of the scores, so it comes first. To normalise the sum
    instead, put ``NormaliseScores`` after it. A missing component is left out of its row's sum; a
    row without any is missing.
    """

    weights: tuple[float, ...]
    normalise: NormaliseScores | None = None

    def __post_init__(self) -> None:
        require_kind(self, weights=(tuple, list), normalise=(NormaliseScores, None))
        object.__setattr__(self, "weights", tuple(self.weights))
        if not self.weights or not all(map(is_finite, self.weights)):
            raise ConfigError(f"CombineScores.weights must be finite numbers, got {self.weights}")

    def init(self) -> tuple[Any, ...]:
        """One memory per component."""
        return tuple(self.normalise.init() if self.normalise else None for _ in self.weights)

    def __call__(
        self, scores: PerSequence, batch: Batch, memory: tuple[Any, ...], workers: Workers = ALONE
    ) -> Staged:
        """The weighted sum of the components."""
        if batch.components is None or batch.components.shape[1] != len(self.weights):
            got = None if batch.components is None else list(batch.components.shape)
            raise DataError(
                f"CombineScores has {len(self.weights)} weights but Batch.components is {got}; "
                "give one column per weight"
            )
        table = wide(batch.components)
        columns = list(torch.where(table.isinf(), torch.nan, table).unbind(1))
        memories = list(memory)
        if self.normalise is not None:
            for k, column in enumerate(columns):
                columns[k], memories[k], _ = self.normalise(column, batch, memories[k], workers)
        table = torch.stack(columns, dim=1)
        total = (table.nan_to_num(nan=0.0) * table.new_tensor(self.weights)).sum(dim=1)
        missing = table.isnan().all(dim=1)
        return Staged(torch.where(missing, torch.nan, total), tuple(memories))
