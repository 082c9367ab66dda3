"""What a task is, and which of its prompts are for evaluation.

Training prompts are an endless stream addressed by number, so that a run resumes at a position
without any state but that number. A prompt belongs to evaluation or to training by its own text,
whatever the seed: the two can never overlap.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

EVALUATION_SHARE = 10  # one prompt in ten


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, with what its answer is checked against."""

    prompt: str
    answer: str | None = None
    """The right answer, where the task knows it."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further columns; the reward function gets them by name."""


@runtime_checkable
class Task(Protocol):
    """A source of prompts."""

    def train(self, seed: int, start: int, count: int) -> list[Example]:
        """Examples number start, …, start + count − 1 of the training stream."""
        ...

    def evaluation(self, count: int) -> list[Example]:
        """At most ``count`` prompts that are never trained on; the same ones each time."""
        ...


def is_for_evaluation(prompt: str) -> bool:
    """Whether a prompt is held out; a property of its text alone."""
    return zlib.crc32(prompt.encode("utf-8", "surrogatepass")) % EVALUATION_SHARE == 0


def is_right(example: Example, completion: str) -> bool | None:
    """Whether the completion is the answer; None where the task does not know one."""
    return None if example.answer is None else completion.strip() == example.answer.strip()
