"""The architecture, as a test: who may import whom, and how big anything may get."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "klamp"
FILES = sorted(SOURCE.rglob("*.py"))
# Low to high; a layer that is not built yet has no files.
LAYERS = ["errors", "arrays", "types", "objective", "heads", "presets", "inspect", "train", "cli"]
PURE = [p for p in FILES if p.relative_to(SOURCE).parts[0] in ("objective", "heads", "presets")]
CORE = [p for p in FILES if p.relative_to(SOURCE).parts[0] in ("objective", "presets")]
TRAIN = [p for p in FILES if p.relative_to(SOURCE).parts[0] in ("train", "inspect", "cli.py")]
MAX_LINES, MAX_NAMES = 250, 25
EXPONENTIATES = {"klamp.objective.logratio", "klamp.objective.exact"}
EXPONENTIALS = {"exp", "exp_", "exp2", "expm1", "expm1_"}
KNOWS_DEVICES = {"klamp.objective.moments"}


def module_name(path):
    return ".".join(("klamp", *path.relative_to(SOURCE).with_suffix("").parts))


def tree(path):
    return ast.parse(path.read_text())


def imports(path):
    """Every module that a file imports; a name taken from klamp itself counts as its module."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module_name(path)} has a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = {m for m in submodules if is_module(m)}
            found |= inner or {node.module}
    return found


def is_module(name):
    path = SOURCE.parent.joinpath(*name.split("."))
    return name.startswith("klamp.") and (path.is_dir() or path.with_suffix(".py").exists())


def layer(module):
    return LAYERS.index(module.split(".")[1])


every_file = pytest.mark.parametrize("path", FILES, ids=module_name)


def test_there_is_something_to_check():
    assert {"objective", "presets"} <= {p.parent.name for p in FILES}
    assert "klamp.types" in imports(SOURCE / "objective" / "reduce.py")
    assert "klamp.objective.prepare" in imports(SOURCE / "objective" / "objective.py")


@every_file
def test_imports_point_downwards(path):
    name = module_name(path)
    if name == "klamp.__init__":
        return
    upward = {m for m in imports(path) if m.startswith("klamp.") and layer(m) > layer(name)}
    assert not upward, f"{name} imports from a higher layer: {upward}"
    assert "klamp" not in imports(path), f"{name} imports the package that imports it"


def test_no_module_needs_itself():
    graph = {
        module_name(p).removesuffix(".__init__"): {m for m in imports(p) if m.startswith("klamp.")}
        for p in FILES
        if module_name(p) != "klamp.__init__"
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", PURE, ids=module_name)
def test_the_core_needs_torch_and_jaxtyping_only(path):
    roots = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names)
    assert roots <= {"torch", "jaxtyping", "klamp"}


@every_file
def test_files_stay_readable_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PURE, ids=module_name)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_one_file_exponentiates_differences_of_log_probs(path):
    """And ``exact.py`` the log-probs themselves. math.exp is of numbers, not of log-probs."""
    used = {
        node.attr
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and not (isinstance(node.value, ast.Name) and node.value.id == "math")
    }
    named = {a.name for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom) for a in n.names}
    found = EXPONENTIALS & (used | named)
    assert bool(found) == (module_name(path) in EXPONENTIATES), found


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_the_core_does_not_know_what_it_runs_on(path):
    if module_name(path) in KNOWS_DEVICES:
        return
    strings = {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant)}
    assert not strings & {"cuda", "cpu", "mps", "xpu"}
    called = {n.attr for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute)}
    assert not called & {"cuda", "cpu", "mps"}


@pytest.mark.parametrize("path", TRAIN, ids=module_name)
def test_only_models_and_sampler_name_a_device(path):
    if path.stem in ("models", "sampler", "settings"):  # settings: the choices of a config
        return
    strings = {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant)}
    assert not strings & {"cuda", "cpu", "mps", "xpu"}
    called = {n.attr for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute)}
    assert not called & {"cuda", "cpu", "mps"}


def test_the_front_door_is_small():
    """What it hands on is written `X as X`; test_startup.py finds nothing else there."""
    names = [
        alias.asname
        for node in ast.walk(tree(SOURCE / "__init__.py"))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname
    ]
    assert len(names) == len(set(names)) <= MAX_NAMES
