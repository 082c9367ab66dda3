"""The log of a run: one JSON line per step, and evaluations with the completions they saw.

    RUN/metrics.jsonl                {"step": 1, "seconds": 0.41, "metrics": {"critic/kl": 0.02, …}}
    RUN/evaluations/step-000000.json before training; step-N: after N updates

A line is appended with one write and synced. A torn last line (the machine went down in the middle
of it) is ignored by every reader and cut away on resume.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klamp.errors import DataError
from klamp.inspect.files import write_json, write_text

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the log."""

    step: int
    seconds: float
    """The step's own, evaluation and saving left out."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a policy answered to one prompt."""

    prompt: str
    completion: str
    answer: str | None
    score: float | None
    correct: bool | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A policy on the evaluation prompts after ``step`` updates (0: before the first)."""

    step: int
    metrics: Mapping[str, float]
    """eval/score, eval/length; eval/accuracy and eval/accuracy_greedy where the task knows."""
    samples: tuple[Completion, ...]


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A whole run as read from its directory."""

    path: Path
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) for each step that has the metric."""
        return [(s.step, s.metrics[name]) for s in self.steps if name in s.metrics]


def append(run: Path, line: Step) -> None:
    """Add one line; it is on disk when this returns."""
    handle = os.open(run / METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, (json.dumps(asdict(line)) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def cut(run: Path, step: int) -> None:
    """Forget every line and evaluation after ``step``, and a torn line."""
    kept = [line for line in lines(run / METRICS) if line.step <= step]
    write_text(run / METRICS, "".join(json.dumps(asdict(line)) + "\n" for line in kept))
    for path in evaluation_paths(run):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def write_evaluation(run: Path, evaluation: Evaluation) -> None:
    """The evaluation as a file of its own."""
    write_json(run / EVALUATIONS / f"step-{evaluation.step:06d}.json", asdict(evaluation))


def read(run: Path) -> RunLog:
    """The run's log, without a torn last line."""
    if not (run / METRICS).is_file():
        raise DataError(
            f"{run} has no {METRICS}: not the directory of a run, or none that made a step; "
            "`klamp train --out DIR` writes one"
        )
    evaluations = tuple(read_evaluation(path) for path in evaluation_paths(run))
    return RunLog(path=run, steps=tuple(lines(run / METRICS)), evaluations=evaluations)


def lines(path: Path) -> Iterator[Step]:
    """The whole lines of a log; only the last may be torn."""
    if not path.exists():
        return
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts[:-1], start=1):
        try:
            raw: dict[str, Any] = json.loads(text)
            yield Step(step=raw["step"], seconds=raw["seconds"], metrics=dict(raw["metrics"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} line {number} is not a step of a log ({error}): {text[:60]!r}; "
                "the file was edited or damaged, remove the line"
            ) from error


def evaluation_paths(run: Path) -> list[Path]:
    """The files of the evaluations, in order."""
    return sorted((run / EVALUATIONS).glob("step-*.json"))


def read_evaluation(path: Path) -> Evaluation:
    """The inverse of ``write_evaluation``."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        samples = tuple(Completion(**sample) for sample in raw["samples"])
        return Evaluation(step=raw["step"], metrics=raw["metrics"], samples=samples)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not an evaluation ({type(error).__name__}: {error}); the file was "
            "edited or damaged, remove it"
        ) from error
