"""How everything here is measured: CPU time of one thread, variants in turn, medians, ratios."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Line(NamedTuple):
    """One line of the table: how much of something a variant needs, relative to another."""

    work: str
    variant: str
    against: str
    measure: str
    ratio: float
    goal: str = ""
    """What was aimed at, such as ``≥ 4`` or ``≤ 0.1``; empty where a number is only shown."""

    def shown(self) -> str:
        """The ratio to three digits or so."""
        return f"{self.ratio:.2f}" if self.ratio < 10 else f"{self.ratio:.1f}"

    def met(self) -> str:
        """Whether the goal was reached in this run, by the digits that are shown."""
        if not self.goal:
            return ""
        sign, number = self.goal.split()
        ratio = float(self.shown())
        return (
            "yes" if (ratio >= float(number) if sign == "≥" else ratio <= float(number)) else "no"
        )


class Result(NamedTuple):
    """What one file measured, and what must be said with it."""

    lines: list[Line]
    notes: str = ""


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int = 11, repeats: int = 1
) -> dict[str, float]:
    """The median CPU seconds of one call of each variant; each round runs all of them."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):  # the first warms up
        for name, run in variants.items():
            start = time.process_time()
            for _ in range(repeats):
                run()
            seconds[name].append((time.process_time() - start) / repeats)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def faster(
    work: str, seconds: Mapping[str, float], ours: str, peers: Mapping[str, str]
) -> list[Line]:
    """How many times faster ours is than each peer; a peer's value is its goal, or empty."""
    return [
        Line(work, ours, peer, "times faster", seconds[peer] / seconds[ours], goal)
        for peer, goal in peers.items()
    ]


def table(lines: list[Line]) -> str:
    """The lines in Markdown."""
    head = "| work | variant | against | measure | ratio | goal | met |"
    rows = [head, "| --- | --- | --- | --- | ---: | --- | --- |"]
    for line in lines:
        told = (line.work, line.variant, line.against, line.measure)
        cells = (*told, line.shown(), line.goal, line.met())
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
