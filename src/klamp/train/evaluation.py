"""A policy on prompts that are never trained on: sampled as in training, and greedy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from klamp.inspect.runlog import Completion, Evaluation
from klamp.train import rewards, rollout, seeds
from klamp.train.models import Models
from klamp.train.sampler import Decoding
from klamp.train.settings import RewardSettings, SamplingSettings
from klamp.train.tasks.task import Example, is_right

ROWS = 256  # prompts of one pass


@dataclass(frozen=True, kw_only=True, eq=False)
class Examiner:
    """What an evaluation needs to know; two policies are asked the same."""

    examples: Sequence[Example]
    sampling: SamplingSettings
    reward: RewardSettings
    shown: int
    seed: int

    def evaluate(self, models: Models, function: rewards.RewardFunction, step: int) -> Evaluation:
        """Accuracy (where the task knows it), score and length of completions."""
        decoding = decoding_of(self.sampling)
        generator = seeds.generator(models.device, "evaluation", self.seed)
        sampled = self.completions(models, decoding, generator)
        greedy = self.completions(models, replace(decoding, greedy=True), None)
        clean = self.reward.model_copy(update={"outliers": None})
        texts = [text for text, _ in sampled]
        scores = rewards.score(function, clean, self.examples, texts, seed="evaluation")
        metrics = {
            "eval/score": mean([s for s in scores if not math.isnan(s)]),
            "eval/length": mean([float(n) for _, n in sampled]),
            "eval/accuracy": accuracy(self.examples, texts),
            "eval/accuracy_greedy": accuracy(self.examples, [text for text, _ in greedy]),
        }
        return Evaluation(
            step=step,
            metrics={k: v for k, v in metrics.items() if v is not None},
            samples=tuple(
                completion(e, t, s)
                for e, t, s in list(zip(self.examples, texts, scores, strict=True))[: self.shown]
            ),
        )

    def completions(
        self, models: Models, decoding: Decoding, generator: torch.Generator | None
    ) -> list[tuple[str, int]]:
        """Text and number of tokens for each example."""
        found: list[tuple[str, int]] = []
        for start in range(0, len(self.examples), ROWS):
            part = self.examples[start : start + ROWS]
            made = rollout.sample(models, part, decoding, generator=generator)
            found += zip(made.texts, made.tokens.mask.sum(dim=1).tolist(), strict=True)
        return found


def decoding_of(sampling: SamplingSettings) -> Decoding:
    """How training samples, as the sampler takes it."""
    return Decoding(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )


def accuracy(examples: Sequence[Example], texts: Sequence[str]) -> float | None:
    """The share of right answers among those that the task can tell; None if it can tell none."""
    told = [is_right(e, t) for e, t in zip(examples, texts, strict=True)]
    return mean([float(right) for right in told if right is not None])


def mean(numbers: Sequence[float]) -> float | None:
    """The mean of at least one number."""
    return sum(numbers) / len(numbers) if numbers else None


def completion(example: Example, text: str, score: float) -> Completion:
    """One completion as the report shows it."""
    return Completion(
        prompt=example.prompt,
        completion=text,
        answer=example.answer,
        score=None if math.isnan(score) else score,
        correct=is_right(example, text),
    )
