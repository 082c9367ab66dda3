"""Every benchmark, into ``benchmarks/results.md``."""

import platform
import sys
from pathlib import Path

import torch

from benchmarks import gae

SUBJECTS = (gae,)


def main() -> None:
    """Print the tables and write them down with the machine and the versions."""
    head = (
        "# Results\n\nWritten by `make bench`. Ratios of median CPU time, one thread, variants in "
        "turn in one process, freed memory kept by the process for all of them alike.\n\n"
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}.\n"
    )
    text = "\n\n".join([head, *(subject.run() for subject in SUBJECTS)]) + "\n"
    Path(__file__).with_name("results.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
