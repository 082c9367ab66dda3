"""Prompts from a file of JSON lines: ``{"prompt": "…", "answer": "…", other columns}``."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from klamp.errors import DataError
from klamp.train.tasks.task import Example, is_for_evaluation


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """Prompts from a file, shuffled anew in each pass over it."""

    training: tuple[Example, ...]
    held_out: tuple[Example, ...]

    def train(self, seed: int, start: int, count: int) -> list[Example]:
        """Passes over the file, one after the other, each in an order of its own."""
        size = len(self.training)
        places = range(start, start + count)
        return [self.training[shuffled(size, seed, i // size)[i % size]] for i in places]

    def evaluation(self, count: int) -> list[Example]:
        """The first ``count`` held-out prompts."""
        return list(self.held_out[:count])


def load(path: Path, evaluation_path: Path | None = None) -> FileTask:
    """The task of a file; without a second one, one prompt in ten is held out by its text."""
    examples = read(path)
    if evaluation_path is not None:
        held_out = read(evaluation_path)
        owned = {e.prompt for e in held_out}
        training = [e for e in examples if e.prompt not in owned]
    else:
        held_out = [e for e in examples if is_for_evaluation(e.prompt)]
        training = [e for e in examples if not is_for_evaluation(e.prompt)]
    if not training:
        raise DataError(
            f"{path} has no prompt to train on: {len(examples)} read, and all of them are for "
            "evaluation; add prompts, or give task.evaluation_file"
        )
    return FileTask(training=tuple(training), held_out=tuple(held_out))


def read(path: Path) -> list[Example]:
    """The examples of a file, each mistake named by its line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompts of {path}: {error}") from error
    found = [_example(path, n, text) for n, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise DataError(f'{path} has no prompts; wanted lines such as {{"prompt": "2+2="}}')
    return found


def _example(path: Path, number: int, text: str) -> Example:
    try:
        row: Any = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} line {number} is not JSON ({error}): {text[:60]!r}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise DataError(f"{path} line {number} has no text under `prompt`: {text[:60]!r}")
    columns = {k: v for k, v in row.items() if k not in ("prompt", "answer")}
    answer = row.get("answer")
    return Example(
        prompt=row["prompt"], answer=None if answer is None else str(answer), columns=columns
    )


@lru_cache(maxsize=4)
def shuffled(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of one pass."""
    order = list(range(size))
    Random(f"order {seed} {epoch}").shuffle(order)
    return tuple(order)
