"""Every benchmark, into ``benchmarks/results.md``: ``python -m benchmarks.run [SUBJECT …]``."""

import importlib
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.timing import Line, Result, table

SUBJECTS = ("objective", "gae", "groups", "head", "exact_kl", "step", "growth", "startup")
PACKAGES = ("torch", "transformers", "trl", "liger-kernel", "numpy")


def main(chosen: list[str]) -> None:
    """Print what was measured; with every subject, write it down with machine and versions."""
    found: list[tuple[str, Result]] = []
    for name in chosen or SUBJECTS:
        result: Result = importlib.import_module(f"benchmarks.{name}").run()
        sys.stdout.write(f"\n{table(result.lines)}\n\n{result.notes}\n")
        sys.stdout.flush()
        found.append((name, result))
    if not chosen:
        Path(__file__).with_name("results.md").write_text(page(found))


def page(found: list[tuple[str, Result]]) -> str:
    """All of it as one table, then what must be said with each subject."""
    lines: list[Line] = [line for _, result in found for line in result.lines]
    notes = [f"- `benchmarks/{name}.py`: {result.notes}" for name, result in found if result.notes]
    return "\n\n".join([HEAD, machine(), table(lines), "## Notes", "\n".join(notes)]) + "\n"


HEAD = """# Results

Written by `make bench`. Ratios in one run: CPU time of one thread, variants in turn in one process,
medians; memory is the most that tensors held at once beyond what was there before the call. The
allocator is the system's with its usual settings, so that fresh memory costs what it costs in
training; this, and the neighbours on a shared machine, move the ratios by a tenth or two between
runs. Peers are the installed packages where a note says so; the others are our re-statement of the
arithmetic that they do. Goals that were not met say so."""


def machine() -> str:
    """What it ran on."""
    with open("/proc/cpuinfo") as f:
        model = next((line.split(":")[1].strip() for line in f if "model name" in line), "")
    return (
        f"{model or platform.processor()}, {platform.system()} {platform.machine()}, "
        f"{torch.backends.cpu.get_cpu_capability()}; Python {platform.python_version()}, "
        f"{', '.join(f'{name} {installed(name)}' for name in PACKAGES)}."
    )


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
