"""What the README says was run: its code, its paths, the examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_twenty_lines_run(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.splitlines()) <= 25
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) == 3


def listed_under(folder):
    (block,) = re.findall(rf"^  {folder}/.*\n((?:    .*\n)+)", README, re.M)
    return set(re.findall(r"^    (\w+\.py) ", block, re.M))


def test_every_core_file_is_in_the_tree_and_nothing_else_is():
    there = {p.name for p in (ROOT / "src/klamp/objective").glob("*.py")} - {"__init__.py"}
    assert listed_under("objective") == there


@pytest.mark.parametrize("folder", ["inspect", "train"])
def test_every_file_that_the_tree_names_exists(folder):
    assert listed_under(folder)
    for name in listed_under(folder):
        assert (ROOT / "src/klamp" / folder / name).exists(), name


def test_every_path_it_names_exists():
    for path in re.findall(
        r"`((?:src|tests|examples|benchmarks|docs|configs|experiments)/[\w/.]*)`", README
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(script):
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
