"""YAML as a person expects it: 1e-4 is a number, and a key given twice is a mistake."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from klamp.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys are given once each."""
        seen = set[Any]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"a key must be a name, got a list or mapping (line {line})")
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=deep)
            if name in seen:
                raise ConfigError(f"the key {name!r} is given twice (line {line}); keep one")
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what the loader would take for a number."""


FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
for known in (_Loader, _Dumper):
    known.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))
# YAML 1.1 gives a lone = a type of its own, which nothing can be built from.
_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: node.value)


def read(path: Path) -> dict[str, Any]:
    """The mapping in a file; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"cannot read {path}: {reason}; give the path of a YAML file") from error
    try:
        found = parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}, wanted a mapping such as `steps: 60`"
        )
    return found


def parse(text: str) -> Any:
    """One YAML value."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"not valid YAML{where}: {problem}") from error


def dump(value: Any) -> str:
    """A plain value as YAML, in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
