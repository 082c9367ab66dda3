"""The settings of a run as its config.yaml has them: as text, and where two runs differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.yaml"
ABSENT = "–"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What config.yaml says; a report must not fail over it, so all of it may be missing."""

    text: str | None
    """The file as it is."""
    objective: str | None
    """Its objective alone, as YAML."""
    flat: dict[str, str]
    """objective.kl.control.target → 6.0; empty if the file is not YAML."""


def read(run: Path) -> Settings:
    """The run's settings, as far as they can be read."""
    path = run / CONFIG
    if not path.is_file():
        return Settings(text=None, objective=None, flat={})
    written = path.read_text(encoding="utf-8", errors="replace")
    values = parsed(written)
    if not isinstance(values, dict):
        return Settings(text=written, objective=None, flat={})
    objective = dumped(values["objective"]) if "objective" in values else None
    return Settings(text=written, objective=objective, flat=dict(flattened(values)))


def parsed(written: str) -> Any:
    """The YAML's plain value; None where it is not YAML, or PyYAML is not installed."""
    try:
        import yaml
    except ModuleNotFoundError:
        return None
    try:
        return yaml.safe_load(written)
    except (yaml.YAMLError, ValueError):
        return None


def dumped(value: Any) -> str:
    """A plain value as YAML, in its own order."""
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, value as text) of every leaf."""
    if isinstance(value, dict) and value:
        inner = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        inner = [(str(index), item) for index, item in enumerate(value)]
    else:
        yield path, "null" if value is None else str(value)
        return
    for key, item in inner:
        yield from flattened(item, f"{path}.{key}" if path else key)


def differences(settings: Sequence[Settings]) -> list[tuple[str, tuple[str, ...]]]:
    """(setting, its value in each run) for every setting that is not the same in all of them."""
    every = dict.fromkeys(key for one in settings for key in one.flat)
    rows = [(key, tuple(one.flat.get(key, ABSENT) for one in settings)) for key in every]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
