"""From the logs of runs to the charts of a report: which lines, of which points."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from klamp.inspect.chartbook import BOOK, Chapter, Curve, Plan, Style, Unit
from klamp.inspect.runlog import RunLog
from klamp.inspect.wording import number, percent

Points = tuple[tuple[int, float | None], ...]
"""(step, value); None where the value was not finite."""
Measured = dict[str, Points]
MOST_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Line:
    """One metric of one run."""

    run: str
    """Its name; empty where there is one run only."""
    label: str
    """The metric's, in this chart."""
    metric: str
    style: Style
    colour: int
    points: Points


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines that share their axes."""

    title: str
    """Empty where the chart's own says it."""
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plan of the book with what there is to draw: one panel, or one for each metric."""

    plan: Plan
    panels: tuple[Panel, ...]
    always_zero: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A chapter of the book with the charts that have anything to show."""

    title: str
    charts: tuple[Chart, ...]
    folded: bool


def sections(names: Sequence[str], logs: Sequence[RunLog]) -> tuple[Section, ...]:
    """The book's chapters, without what was not logged. Each metric is in exactly one place."""
    measured = [everything(log) for log in logs]
    home = homes(sorted({metric for one in measured for metric in one}))
    found = (section(chapter, names, measured, home) for chapter in BOOK)
    return tuple(one for one in found if one.charts)


def section(
    chapter: Chapter, names: Sequence[str], measured: Sequence[Measured], home: dict[str, Plan]
) -> Section:
    """The chapter's charts, without those that have nothing to show."""
    charts = [chart(plan, curves(plan, home), names, measured) for plan in chapter.plans]
    shown = tuple(one for one in charts if one.panels or one.always_zero)
    return Section(title=chapter.title, charts=shown, folded=chapter.folded)


def everything(log: RunLog) -> Measured:
    """Every series of a run by name: of its steps, of its evaluations, and the seconds."""
    found: dict[str, dict[int, float]] = {}
    for step in log.steps:
        for metric, value in {**step.metrics, "seconds": step.seconds}.items():
            found.setdefault(metric, {})[step.step] = value
    for evaluation in log.evaluations:
        for metric, value in evaluation.metrics.items():
            found.setdefault(metric, {})[evaluation.step] = value
    finite = {metric: finite_only(points) for metric, points in found.items()}
    return {metric: points for metric, points in finite.items() if has_values(points)}


def finite_only(points: dict[int, float]) -> Points:
    """The points by step, with None for what cannot be drawn."""
    return tuple((x, y if drawable(y) else None) for x, y in sorted(points.items()))


def drawable(value: object) -> bool:
    """Whether a logged value is a number that has a place on an axis."""
    return isinstance(value, int | float) and math.isfinite(value)


def has_values(points: Points) -> bool:
    """Whether there is anything to draw."""
    return any(y is not None for _, y in points)


def homes(metrics: Sequence[str]) -> dict[str, Plan]:
    """The plan that draws each metric: the one that names it, or the first whose family it is."""
    plans = [plan for chapter in BOOK for plan in chapter.plans]
    named = {curve.metric: plan for plan in plans for curve in plan.curves}
    return {
        metric: named.get(metric)
        or next(p for p in plans if p.family and re.fullmatch(p.family, metric))
        for metric in metrics
    }


def curves(plan: Plan, home: dict[str, Plan]) -> list[Curve]:
    """The plan's own curves, then its family by name."""
    metrics = [metric for metric, owner in home.items() if owner is plan]
    own = [curve for curve in plan.curves if curve.metric in metrics]
    known = {curve.metric for curve in own}
    rest = [metric for metric in metrics if metric not in known]
    return own + [Curve(metric=m, label=m.removeprefix(plan.prefix)) for m in rest]


def chart(
    plan: Plan, logged: list[Curve], names: Sequence[str], measured: Sequence[Measured]
) -> Chart:
    """The plan's panels, and the names of what there is no need to draw."""
    silent = [curve for curve in logged if always_zero(curve.metric, measured)]
    drawn = [curve for curve in logged if curve not in silent]
    apart = plan.apart == "always" or (plan.apart == "overlaid" and len(names) > 1)
    together = [panel("", drawn, names, measured)] if drawn else []
    each = [panel(curve.label, [curve], names, measured) for curve in drawn]
    return Chart(
        plan=plan,
        panels=tuple(each if apart else together),
        always_zero=tuple(curve.metric for curve in silent),
    )


def always_zero(metric: str, measured: Sequence[Measured]) -> bool:
    """Whether no run ever logged anything but 0."""
    return all(y == 0 for one in measured for _, y in one.get(metric, ()))


def panel(
    title: str, group: list[Curve], names: Sequence[str], measured: Sequence[Measured]
) -> Panel:
    """The curves of every run: a colour for each run, or for each curve if there is one run."""
    overlaid = len(names) > 1
    lines = [
        Line(
            run=name if overlaid else "",
            label=curve.label,
            metric=curve.metric,
            style=curve.style,
            colour=run if overlaid else index,
            points=thinned(one[curve.metric]),
        )
        for run, (name, one) in enumerate(zip(names, measured, strict=True))
        for index, curve in enumerate(group)
        if curve.metric in one
    ]
    return Panel(title=title, lines=tuple(lines))


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """The lowest and the highest point of each stretch, the first and the last: no peak is lost."""
    if len(points) <= most:
        return points
    stretch = math.ceil(2 * len(points) / (most - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), stretch):
        part = [p for p in points[start : start + stretch] if p[1] is not None]
        kept |= {min(part, key=height), max(part, key=height)} if part else {points[start]}
    return tuple(sorted(kept, key=lambda point: point[0]))


def height(point: tuple[int, float | None]) -> float:
    """The value of a point that has one."""
    return point[1] or 0.0


def in_words(panel: Panel, plan: Plan) -> str:
    """The panel for who cannot see it: where each line begins and ends."""
    title = ": ".join(filter(None, (plan.title, panel.title)))
    known = {line.label for line in panel.lines} == {panel.title}
    lines = (line_in_words(line, plan.unit, known) for line in panel.lines)
    return f"{title}. " + "; ".join(lines) + "."


def line_in_words(line: Line, unit: Unit, known: bool) -> str:
    """``KL: 0.01 at step 1, 5.8 at step 60``; without the metric's name if that is known."""
    shown = [(x, y) for x, y in line.points if y is not None]
    words = percent if unit == "percent" else number
    ends = [shown[0]] if len(shown) == 1 else [shown[0], shown[-1]]
    name = " · ".join(filter(None, (line.run, "" if known else line.label)))
    spoken = ", ".join(f"{words(y)} at step {x}" for x, y in ends)
    return f"{name}: {spoken}" if name else spoken
