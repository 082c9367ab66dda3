"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from klamp.inspect.runlog import Step
from klamp.train.config import Config

BARS = "▁▂▃▄▅▆▇█"
TREND = 30  # columns of a sparkline
ROWS: tuple[tuple[str, str, str], ...] = (
    ("true accuracy, sampled", "task/accuracy", "percent"),
    ("· held out, sampled", "eval/accuracy", "percent"),
    ("· held out, greedy", "eval/accuracy_greedy", "percent"),
    ("reward (what is trained on)", "critic/score/mean", "number"),
    ("KL to the reference", "critic/kl", "number"),
    ("· target", "critic/kl_target", "number"),
    ("β", "critic/kl_coef", "number"),
    ("rewards clipped", "critic/reward_clip_frac", "percent"),
    ("advantages clipped", "critic/advantage_clip_frac", "percent"),
    ("ratios clipped", "actor/clip_frac", "percent"),
    ("entropy", "actor/entropy", "number"),
    ("response length", "response/length_mean", "number"),
    ("tokens per second", "time/tokens_per_second", "count"),
)


@runtime_checkable
class View(Protocol):
    """Somebody who watches."""

    def __enter__(self) -> "View":
        """The run begins."""
        ...

    def __exit__(self, *error: object) -> None:
        """The run is over, one way or the other."""
        ...

    def __call__(self, line: Step, warnings: Sequence[str]) -> None:
        """One step is done."""
        ...


def view_of(config: Config, place: Path, *, quiet: bool) -> View:
    """The view that fits where the output goes."""
    if quiet:
        return Quiet()
    return Live(config, place) if sys.stdout.isatty() else Plain(config, place)


class Quiet:
    """Warnings only."""

    def __enter__(self) -> "Quiet":
        """Nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""

    def __call__(self, line: Step, warnings: Sequence[str]) -> None:
        """Warnings, to stderr."""
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)


class Plain(Quiet):
    """Some twenty lines over the run, for a log file."""

    def __init__(self, config: Config, place: Path) -> None:
        self.config, self.place = config, place
        self.every = max(1, config.steps // 18)

    def __enter__(self) -> "Plain":
        """What is about to happen."""
        print(headline(self.config, self.place), flush=True)
        return self

    def __call__(self, line: Step, warnings: Sequence[str]) -> None:
        """One line with what matters most."""
        super().__call__(line, warnings)
        if line.step % self.every == 0 or line.step in (1, self.config.steps):
            print(plain_line(line, self.config.steps), flush=True)


class Live(Quiet):
    """A progress bar with the time left, and a table of values with their trends."""

    def __init__(self, config: Config, place: Path) -> None:
        from rich.live import Live as RichLive

        self.config, self.place = config, place
        self.began, self.first = time.monotonic(), 0
        self.history: dict[str, list[float]] = {}
        self.last: Step | None = None
        self.said: list[str] = []
        self.live = RichLive(self.drawn(), refresh_per_second=8, transient=False)

    def __enter__(self) -> "Live":
        """Draw from now on."""
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """The last picture stays."""
        self.live.stop()

    def __call__(self, line: Step, warnings: Sequence[str]) -> None:
        """Draw the new values."""
        self.first = self.first or line.step
        self.last = line
        self.said = [*self.said, *(w for w in warnings if w not in self.said)][-3:]
        for _, name, _ in ROWS:
            known = name != "task/accuracy" or line.metrics.get("task/graded")
            if name in line.metrics and known:
                self.history.setdefault(name, []).append(line.metrics[name])
        self.live.update(self.drawn())

    def drawn(self) -> Any:
        """The whole picture."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = self.last.step if self.last else 0
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {done}/{self.config.steps}",
            ProgressBar(total=self.config.steps, completed=done, width=34),
            self.time_left(done),
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("")
        table.add_column("now", justify="right")
        table.add_column("from the start")
        for label, name, kind in ROWS:
            values = self.history.get(name, [])
            if values:
                table.add_row(label, shown(values[-1], kind), sparkline(values))
        warned = [Text(f"warning: {w}", style="yellow") for w in self.said]
        return Group(Text(headline(self.config, self.place), style="bold"), bar, table, *warned)

    def time_left(self, done: int) -> str:
        """How long the rest takes at the pace so far."""
        if not done:
            return "starting: the policy is evaluated before the first step"
        made = done - self.first + 1
        seconds = (time.monotonic() - self.began) / made * (self.config.steps - done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def headline(config: Config, place: Path) -> str:
    """Which run this is."""
    what = config.task.file or config.task.name
    return (
        f"klamp: {config.model.path} on {what}, reward {config.reward.function}, "
        f"{config.steps} steps of {config.sampling.prompts} × "
        f"{config.sampling.samples_per_prompt} samples → {place}"
    )


def plain_line(line: Step, steps: int) -> str:
    """One step in one line."""
    m = line.metrics
    parts = [f"step {line.step:>{len(str(steps))}}/{steps}"]
    if m.get("task/graded"):
        parts.append(f"accuracy {shown(m['task/accuracy'], 'percent')}")
    if "eval/accuracy" in m:
        greedy = shown(m["eval/accuracy_greedy"], "percent")
        parts.append(f"held out {shown(m['eval/accuracy'], 'percent')} (greedy {greedy})")
    parts.append(f"reward {m['critic/score/mean']:.3f}")
    target = f" of {m['critic/kl_target']:g}" if m["critic/kl_target"] else ""
    kl = shown(m["critic/kl"], "number")
    parts.append(f"KL {kl}{target}  β {m['critic/kl_coef']:.3f}")
    parts.append(f"clipped {shown(m.get('actor/clip_frac', 0.0), 'percent')}")
    parts.append(f"{m['time/tokens_per_second']:.0f} tokens/s")
    return "  ".join(parts)


def shown(value: float, kind: str) -> str:
    """A number as a person reads it: never as −0."""
    number = f"{value:z.3f}"
    return {"percent": f"{100 * value:.1f} %", "count": f"{value:,.0f}"}.get(kind, number)


def sparkline(values: Sequence[float]) -> str:
    """The course of a metric in at most ``TREND`` characters."""
    width = min(TREND, len(values))
    ends = [round(i * len(values) / width) for i in range(width + 1)]
    parts = [values[a:b] for a, b in itertools.pairwise(ends)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BARS[min(int((x - low) / span * len(BARS)), len(BARS) - 1)] for x in means)
