"""How time and memory grow: with rows, length, vocabulary, group size and workers.

Each subject is measured at doubling sizes; the exponent is the slope of a straight line through the
logarithms of the larger half. Nothing should be worse than linear in tokens. Workers are processes
over gloo that hold the same number of tokens each; what one of them spends should not grow.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import klamp
from benchmarks.memory import peak
from benchmarks.timing import Line, Result, interleaved
from klamp.heads.logprobs import label_logprobs
from klamp.objective.advantages import gae
from klamp.objective.metrics import reduced
from klamp.train.comm import Distributed

LINEAR = "≤ 1.1"
FLAT = "≤ 0.3"
OBJECTIVE = klamp.Objective(
    stages=(klamp.NormaliseScores(),),
    kl=klamp.KLTerm(estimator="k3", gradient="sequence", control=klamp.AdaptiveKL()),
)


class Curve(NamedTuple):
    """What a subject needs at each size."""

    subject: str
    against: str
    sizes: tuple[int, ...]
    seconds: list[float]
    memory: list[float]
    goal: str


def experience(rows, width, group=8):
    """A batch of full rows in groups."""
    torch.manual_seed(0)
    logprobs = -torch.rand(rows, width)
    return klamp.Batch(
        mask=torch.ones(rows, width, dtype=torch.bool),
        scores=torch.rand(rows),
        groups=torch.arange(rows) // group,
        old_logprobs=logprobs,
        ref_logprobs=logprobs + 0.1 * torch.randn(rows, width),
    )


def whole_step(rows, width, group=8, workers=klamp.ALONE):
    """prepare, shares, loss, backward, numbers."""
    batch = experience(rows, width, group)
    logprobs = (batch.old_logprobs + 0.05).requires_grad_()
    state = OBJECTIVE.init()

    def run():
        logprobs.grad = None
        targets, _ = OBJECTIVE.prepare(batch, state, workers)
        shares = OBJECTIVE.shares(targets.mask, targets.weights, workers)
        out = OBJECTIVE.loss(logprobs, batch, targets, shares)
        out.loss.backward()
        return reduced(out.metrics, workers)

    return run


def advantages(rows, width):
    rewards, values = torch.randn(2, rows, width)
    mask = torch.rand(rows, width) < 0.9
    return lambda: gae(rewards, values, mask)


def head(tokens, vocabulary):
    hidden = torch.randn(tokens, 64, requires_grad=True)
    weight = torch.randn(vocabulary, 64).requires_grad_()
    labels, upstream = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)

    def run():
        hidden.grad = weight.grad = None
        label_logprobs(hidden, weight, labels)[0].backward(upstream)

    return run


SUBJECTS: dict[tuple[str, str], tuple[tuple[int, ...], Callable[[int], Callable[[], object]]]] = {
    ("objective", "rows"): ((16, 32, 64, 128, 256), lambda n: whole_step(n, 1024)),
    ("objective", "length"): ((512, 1024, 2048, 4096, 8192), lambda n: whole_step(32, n)),
    ("GAE with holes", "rows"): ((16, 32, 64, 128, 256), lambda n: advantages(n, 2048)),
    ("GAE with holes", "length"): ((1024, 2048, 4096, 8192, 16384), lambda n: advantages(64, n)),
    ("LM head", "tokens"): ((128, 256, 512, 1024, 2048), lambda n: head(n, 8000)),
    ("LM head", "vocabulary"): ((8000, 16000, 32000, 64000, 128000), lambda n: head(256, n)),
}


def measured(key) -> Curve:
    sizes, make = SUBJECTS[key]
    runs = {str(n): make(n) for n in sizes}
    seconds = interleaved(runs, rounds=5)
    return Curve(*key, sizes, list(seconds.values()), [peak(r) for r in runs.values()], LINEAR)


def group_sizes() -> Curve:
    """The same rows in fewer, larger groups."""
    sizes = (2, 8, 32, 128, 512)
    runs = {str(n): whole_step(512, 128, n) for n in sizes}
    seconds = interleaved(runs, rounds=5)
    memory = [peak(run) for run in runs.values()]
    return Curve("objective", "group size", sizes, list(seconds.values()), memory, FLAT)


def workers() -> Curve:
    """Processes that share one step, 32 rows of 1024 tokens each."""
    sizes, seconds, memory = (1, 2, 4), [], []
    for size in sizes:
        with tempfile.TemporaryDirectory() as place:
            context = torch.multiprocessing.spawn(
                _worker, args=(size, place), nprocs=size, join=False
            )
            while not context.join():
                pass
            found = [torch.load(path) for path in sorted(Path(place).glob("*.pt"))]
        seconds.append(statistics.median(s for s, _ in found))
        memory.append(max(m for _, m in found))
    return Curve("objective", "workers", sizes, seconds, memory, FLAT)


def _worker(rank, size, place):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=size
    )
    run, times = whole_step(32, 1024, workers=Distributed(rank, size)), []
    for _ in range(12):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    torch.save((statistics.median(times[2:]), peak(run)), f"{place}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def exponent(sizes, values) -> float:
    """The slope of log value against log size over the larger half of the sizes."""
    half = len(sizes) // 2
    x = [math.log(n) for n in sizes[half:]]
    y = [math.log(max(v, 1e-12)) for v in values[half:]]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum(
        (a - mx) ** 2 for a in x
    )


def draw(curves: list[Curve], path: Path) -> None:
    """Time and memory of every subject, relative to its smallest size; dashed: linear."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "klamp", "svg.fonttype": "path"})
    figure, axes = plt.subplots(
        2, len(curves), figsize=(2.3 * len(curves), 4.6), layout="constrained"
    )
    for column, curve in enumerate(curves):
        for row, (what, values) in enumerate((("time", curve.seconds), ("memory", curve.memory))):
            plot = axes[row][column]
            start = curve.sizes[0]
            plot.loglog(curve.sizes, [v / values[0] for v in values], "o-", color="#0072b2")
            linear = [1.0 if curve.goal == FLAT else n / start for n in curve.sizes]
            plot.loglog(curve.sizes, linear, "--", color="#888888", linewidth=0.9)
            plot.set_xticks(curve.sizes, [f"{n:,}" for n in curve.sizes], rotation=60, fontsize=7)
            if curve.goal == FLAT:
                plot.set_ylim(0.2, 5.0)
            plot.minorticks_off()
            plot.set_title(f"{curve.subject}\nby {curve.against}" if row == 0 else "", fontsize=9)
            plot.set_ylabel(f"{what}, smallest = 1" if column == 0 else "")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def run() -> Result:
    curves = [*(measured(key) for key in SUBJECTS), group_sizes(), workers()]
    draw(curves, Path(__file__).with_name("growth.svg"))
    lines = []
    for c in curves:
        for what, values in (("time", c.seconds), ("memory", c.memory)):
            work = f"growth of {c.subject}"
            slope = exponent(c.sizes, values)
            lines.append(Line(work, what, c.against, "exponent", slope, c.goal))
    notes = (
        "exponents of time and peak memory over the larger half of the sizes in `growth.svg`: 1 is "
        "linear, 0 does not grow. The group size changes at a fixed number of rows; workers hold "
        "32 × 1,024 tokens each, and the CPU time is that of one worker's own thread."
    )
    return Result(lines, notes)
