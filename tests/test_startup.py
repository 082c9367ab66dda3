"""What is imported when: whoever only asks for help does not wait for torch."""

import ast
import json
import pickle
import pydoc
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import klamp

TRAINS = {"transformers", "pydantic", "yaml"}
HEAVY = {"torch", "numpy", "jaxtyping", *TRAINS}
SHOWS = {"rich", "typer"}
PACKAGES = "import json; print(json.dumps([m for m in sys.modules if '.' not in m]))"


def python(code):
    """A Python of its own, without the import hook of these tests."""
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def imported_by(code):
    """The packages that are there after some code ran."""
    done = python(f"import sys\n{code}\n{PACKAGES}")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def imported_by_command(*words):
    """The same after a command, however that ended."""
    run = "try: cli.main()\nexcept SystemExit: pass"
    return imported_by(f"from klamp import cli\nsys.argv = {['klamp', *map(str, words)]}\n{run}")


def in_the_source():
    """Name → module of all that ``__init__.py`` hands on, as a type checker reads it."""
    return {
        alias.asname: node.module
        for node in ast.walk(ast.parse(Path(klamp.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


# What is imported.


def test_the_package_and_its_errors_import_nothing_heavy():
    found = imported_by("import klamp; klamp.KlampError; dir(klamp); hasattr(klamp, 'cli')")
    assert "klamp" in found and not found & (HEAVY | SHOWS)


@pytest.mark.parametrize("words", [["--help"], ["-h"], []], ids=" ".join)
def test_help_imports_nothing_heavy(words):
    found = imported_by_command(*words)
    assert found >= SHOWS and not found & HEAVY


@pytest.mark.parametrize(
    "words", [["train", "--help"], ["trian"], ["report", "no-run"]], ids=" ".join
)
def test_what_needs_no_tensor_imports_nothing_heavy(words):
    found = imported_by_command(*words)
    assert "typer" in found and not found & HEAVY - {"pydantic"}  # typer reads arguments with it


def test_the_core_imports_torch_and_nothing_that_trains():
    found = imported_by("import klamp; klamp.Objective; klamp.presets.load('klamp')")
    assert "torch" in found and not found & (TRAINS | SHOWS)


# The names, which are there though not imported yet.


def test_a_type_checker_sees_what_there_is_and_there_is_nothing_else():
    bound = {name for name, value in vars(klamp).items() if not isinstance(value, ModuleType)}
    public = {name for name in bound if not name.startswith("_")} - {"TYPE_CHECKING"}
    assert public <= set(klamp.__all__) and sorted(in_the_source()) == klamp.__all__


@pytest.mark.parametrize("name", klamp.__all__)
def test_every_name_is_that_of_its_module(name):
    home = in_the_source()[name]
    there = (
        import_module("klamp.presets") if home == "klamp" else getattr(import_module(home), name)
    )
    assert getattr(klamp, name) is there


def test_a_star_dir_and_help_show_them_all():
    taken = {}
    exec("from klamp import *", taken)
    assert taken.keys() - {"__builtins__"} == set(klamp.__all__) == set(dir(klamp))
    shown = pydoc.plain(pydoc.render_doc(klamp))
    assert all(f"class {name}(" in shown for name in ("Objective", "Batch", "ConfigError"))


def test_a_class_is_pickled_as_that_of_its_module():
    for kind in (klamp.Objective, klamp.Batch, klamp.ConfigError):
        assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Objectiv", "did you mean 'Objective'?"),
        ("batch", "did you mean 'Batch'?"),
        ("preset", "did you mean 'presets'?"),
        ("KlampErorr", "did you mean 'KlampError'?"),
        ("zzz", f"one of {', '.join(klamp.__all__)}"),
    ],
)
def test_a_misspelt_name_names_the_nearest(given, said):
    assert not hasattr(klamp, given)
    with pytest.raises(AttributeError) as refused:
        getattr(klamp, given)
    assert str(refused.value) == f"module 'klamp' has no attribute {given!r}; {said}"


def test_the_nearest_name_is_said_once():
    last = python("import klamp; klamp.Objectiv").stderr.splitlines()[-1]
    assert last.lower().count("did you mean") == 1
