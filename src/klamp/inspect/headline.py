"""What a reader wants to know first: did it learn, what did the reward say, did the KL hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from klamp.inspect.charts import Measured, drawable, everything
from klamp.inspect.runlog import RunLog
from klamp.inspect.wording import count, listed, number, percent, signed

SKIPPED = ("actor/skipped_steps", "actor/skipped_updates")
LAST = 10
"""Steps over which a noisy value is averaged."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One run's answer to a tile's question."""

    before: str | None
    after: str
    change: str | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A question, and the answer of each run."""

    title: str
    facts: tuple[Fact, ...]


def tiles(logs: Sequence[RunLog]) -> tuple[Tile, ...]:
    """The three questions."""
    measured = [everything(log) for log in logs]
    asked = (("True accuracy", accuracy), ("Proxy score", score), ("KL against target", kl))
    return tuple(
        Tile(title=title, facts=tuple(answer(one) for one in measured)) for title, answer in asked
    )


def accuracy(measured: Measured) -> Fact:
    """Of the first and the last evaluation; of the steps' samples if there was none."""
    greedy = values(measured, "eval/accuracy_greedy")
    if evaluated := values(measured, "eval/accuracy"):
        detail = "sampled, on the evaluation prompts"
        if greedy:
            detail = f"greedy {arrow(greedy, percent)}"
        return moved(evaluated, percent, detail)
    if greedy:
        return moved(greedy, percent, "greedy, on the evaluation prompts")
    sampled = values(measured, "task/accuracy")
    if any(sampled):
        return moved(sampled, percent, "of training samples; no evaluation was made")
    return unknown("neither eval/accuracy nor task/accuracy says anything")


def score(measured: Measured) -> Fact:
    """The raw reward of the first and the last step."""
    sampled = values(measured, "critic/score/mean")
    if not sampled:
        return unknown("the log has no critic/score/mean")
    evaluated = values(measured, "eval/score")
    ends = "mean reward, first and last step"
    return moved(sampled, number, f"evaluation {arrow(evaluated, number)}" if evaluated else ends)


def kl(measured: Measured) -> Fact:
    """The mean of the last steps, and how far that is from the target."""
    recent = values(measured, "critic/kl")[-LAST:]
    if not recent:
        return unknown("the log has no critic/kl")
    mean = fmean(recent)
    over = f"mean of the last {count(len(recent), 'step')}"
    target = (values(measured, "critic/kl_target") or [0.0])[-1]
    if target <= 0:
        return Fact(before=None, after=number(mean), change=None, detail=f"{over}; no target")
    return Fact(
        before=None,
        after=number(mean),
        change=beside(mean / target - 1),
        detail=f"target {number(target)}; {over}",
    )


def beside(excess: float) -> str:
    """Where a mean is, seen from its target."""
    share = round(100 * abs(excess))
    return "at the target" if not share else f"{share} % {'above' if excess > 0 else 'below'}"


def values(measured: Measured, metric: str) -> list[float]:
    """A metric's finite values in order."""
    return [y for _, y in measured.get(metric, ()) if y is not None]


def arrow(series: list[float], words: Callable[[float], str]) -> str:
    """``12.5 % → 84.4 %``, or the one value there is."""
    ends = [words(series[0]), words(series[-1])]
    return " → ".join(ends if len(series) > 1 else ends[:1])


def moved(series: list[float], words: Callable[[float], str], detail: str) -> Fact:
    """From the first value to the last."""
    several = len(series) > 1
    return Fact(
        before=words(series[0]) if several else None,
        after=words(series[-1]),
        change=signed(words(series[-1] - series[0]).replace("%", "points")) if several else None,
        detail=detail,
    )


def unknown(why: str) -> Fact:
    """An answer that the log does not hold."""
    return Fact(before=None, after="–", change=None, detail=why)


def warnings(log: RunLog) -> Iterator[str]:
    """What the reader has to know before believing a chart."""
    if not log.steps:
        yield "The log has no whole step yet."
    for metric in SKIPPED:
        above = [(x, y) for x, y in log.series(metric) if drawable(y) and y > 0]
        if above:
            yield (
                f"Updates were skipped because something was not finite: {metric} is above 0 at "
                f"{count(len(above), 'step')}, first at step {above[0][0]}. klamp doctor names the "
                "cause."
            )
    broken = [
        f"{metric} at step {step.step}"
        for step in log.steps
        for metric, value in step.metrics.items()
        if not drawable(value)
    ]
    if broken:
        yield f"Not finite, and left out of the charts: {listed(broken, 5)}."
