"""How everything here is measured: CPU time of one thread, variants in turn, medians, ratios."""

import statistics
import time
from collections.abc import Callable

import torch


def interleaved(variants: dict[str, Callable[[], object]], rounds: int = 11) -> dict[str, float]:
    """The median CPU seconds of each variant; each round runs all of them once."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def table(title: str, baseline: str, medians: dict[str, float]) -> str:
    """A Markdown table of each variant's ratio to the baseline."""
    rows = [f"| {title} | times faster than {baseline} |", "| --- | ---: |"]
    rows += [
        f"| {name} | {medians[baseline] / seconds:.1f} |"
        for name, seconds in medians.items()
        if name != baseline
    ]
    return "\n".join(rows)
