"""What a score stage is: settings that map scores to scores and remember what they must.

A stage is a frozen dataclass. ``init`` gives its first memory (a plain value, which goes into the
checkpoint), calling it returns the new scores, the new memory and what it counted. Scores travel
in float64; NaN is a missing score, which no statistic sees and no stage fills in.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from klamp.objective.metrics import Metric
from klamp.types import Batch, PerSequence, Workers


class Staged(NamedTuple):
    """What a stage returns."""

    scores: PerSequence
    memory: Any = None
    metrics: Mapping[str, Metric] = {}


@runtime_checkable
class ScoreStage(Protocol):
    """Any frozen dataclass with these two is a stage; see CONTRIBUTING.md for a recipe."""

    def init(self) -> Any:
        """The memory before the first batch."""

    def __call__(self, scores: PerSequence, batch: Batch, memory: Any, workers: Workers) -> Staged:
        """The new scores, the new memory, and metrics."""
        ...
