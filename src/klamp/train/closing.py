"""The last words of a run: what improved, where it is, what to do next."""

from collections.abc import Sequence
from pathlib import Path

from klamp.inspect.runlog import RunLog
from klamp.train.config import Config
from klamp.train.view import shown

LAST = 10  # steps that the end is read from


def closing(config: Config, log: RunLog) -> list[str]:
    """Three lines."""
    return [improved(log), where(log.path), onwards(config, log.path)]


def interrupted(place: Path, step: int, steps: int) -> list[str]:
    """What to say when a run was asked to stop."""
    return [
        f"stopped after step {step} of {steps}; everything is saved in {place}",
        f"go on with: klamp train --resume {place}",
    ]


def improved(log: RunLog) -> str:
    """Accuracy, reward and KL, before and after."""
    parts: list[str] = []
    if log.evaluations:
        before, after = log.evaluations[0].metrics, log.evaluations[-1].metrics
        for name, label in (("eval/accuracy", "sampled"), ("eval/accuracy_greedy", "greedy")):
            if name in before and name in after:
                change = f"{shown(before[name], 'percent')} → {shown(after[name], 'percent')}"
                parts.append(f"{change} {label}")
    said = f"true accuracy {', '.join(parts)}; " if parts else ""
    scores = [value for _, value in log.series("critic/score/mean")]
    said += f"reward {scores[0]:.2f} → {mean(scores[-LAST:]):.2f}"
    return said + held(log)


def held(log: RunLog) -> str:
    """The KL of the last steps, against its target where it has one."""
    kl = [value for _, value in log.series("critic/kl")]
    target = log.series("critic/kl_target")[-1][1]
    if max(map(abs, kl)) < 1e-5:  # nothing but rounding
        return ""
    aim = f" (target {target:g})" if target else ""
    return f"; KL {mean(kl[-LAST:]):.2f}{aim}"


def where(place: Path) -> str:
    """What is in the run directory."""
    return f"run in {place}: report.html to look at, model/ to load, metrics.jsonl to plot"


def onwards(config: Config, place: Path) -> str:
    """The one thing to do next."""
    if config.reward.function == "leaky" and config.goal.kl is not None:
        return "next: `make train-contrast` trains the same without KL, and overlays the two runs"
    return f"next: `klamp eval {place}`, or `klamp report {place} OTHER_RUN` to compare"


def mean(numbers: Sequence[float]) -> float:
    """The mean."""
    return sum(numbers) / len(numbers)
