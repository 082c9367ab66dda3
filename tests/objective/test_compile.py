"""The loss call compiles whole: one graph, no break, the same numbers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_loss_compiles_whole_for_every_preset():
    """In a run of its own: our shape checks cannot be traced, and users do not have them."""
    tests = Path(__file__).with_name("compiled.py")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", str(tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
