"""A score stage of your own: any frozen dataclass with ``init`` and ``__call__``."""

from dataclasses import dataclass, replace

import torch

import klamp
from klamp.objective.metrics import mean_of
from klamp.objective.stage import Staged


@dataclass(frozen=True, kw_only=True)
class DecayScores:
    """score · decay^batches: a curriculum bonus that fades. Remembers how many batches it saw."""

    decay: float = 0.99

    def init(self) -> int:
        """No batch seen yet."""
        return 0

    def __call__(self, scores, batch, memory, workers) -> Staged:
        """Scores of this batch, the count after it, and a metric."""
        faded = scores * self.decay**memory
        metrics = {"critic/decayed_score": mean_of(faded, ~faded.isnan())}
        return Staged(faded, memory + 1, metrics)


objective = klamp.presets.load("klamp")
objective = replace(objective, stages=(DecayScores(decay=0.5), *objective.stages))
batch = klamp.Batch(
    mask=torch.ones(4, 3, dtype=torch.bool),
    scores=torch.tensor([0.0, 1.0, 2.0, 3.0]),
    groups=torch.zeros(4, dtype=torch.long),
    old_logprobs=torch.zeros(4, 3),
    ref_logprobs=torch.zeros(4, 3),
)
state = objective.init()
for _ in range(3):
    targets, state = objective.prepare(batch, state)
    print("mean score after the stage:", targets.metrics["critic/decayed_score"])

written = klamp.Objective.from_dict(objective.to_dict(), extra=[DecayScores])
print("survives a round trip through a plain dict:", written == objective)
