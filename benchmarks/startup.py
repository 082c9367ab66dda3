"""Starting up: what klamp adds to the import of torch, and how long its help takes."""

import os
import resource
import statistics
import subprocess
import sys

from benchmarks.timing import Line, Result

ROUNDS = 7
HELP_SECONDS, MORE_SECONDS = 0.5, 0.2  # what help may take; what the core may add to torch
TORCH, PACKAGE, CORE = "`import torch`", "`import klamp`", "`klamp.Objective`"
HELP, TRAIN_HELP = "`klamp --help`", "`klamp train --help`"
WORDS = {
    TORCH: ["-c", "import torch"],
    PACKAGE: ["-c", "import klamp"],
    CORE: ["-c", "import klamp; klamp.Objective"],
    HELP: ["-m", "klamp.cli", "--help"],
    TRAIN_HELP: ["-m", "klamp.cli", "train", "--help"],
}


def children():
    """The CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def process(words):
    """The CPU seconds of one Python process, from its start to its end."""
    before = children()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return children() - before


def rounds():
    """The CPU seconds of every process in every round."""
    seconds = {name: [] for name in WORDS}
    for _ in range(ROUNDS + 1):  # the first fills the cache of files
        for name, words in WORDS.items():
            seconds[name].append(process(words))
    return {name: times[1:] for name, times in seconds.items()}


def run() -> Result:
    seconds = rounds()
    median = {name: statistics.median(times) for name, times in seconds.items()}
    pairs = zip(seconds[CORE], seconds[TORCH], strict=True)
    more = statistics.median(core - torch for core, torch in pairs)
    lines = [
        line(HELP, f"{HELP_SECONDS} s", median[HELP] / HELP_SECONDS, "≤ 1"),
        line(TRAIN_HELP, f"{HELP_SECONDS} s", median[TRAIN_HELP] / HELP_SECONDS, "≤ 1"),
        line(f"{CORE} less {TORCH}", f"{MORE_SECONDS} s", more / MORE_SECONDS, "≤ 1"),
        *(line(name, TORCH, median[name] / median[TORCH]) for name in (PACKAGE, CORE, HELP)),
    ]
    each = ", ".join(f"{name} {value:.2f} s" for name, value in median.items())
    return Result(lines, f"Whole processes, medians of {ROUNDS}: {each}.")


def line(variant, against, ratio, goal=""):
    return Line("start-up", variant, against, "CPU time", ratio, goal)
