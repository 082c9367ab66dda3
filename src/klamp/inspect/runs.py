"""A run as its report sees it: a name, the log, the settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klamp.errors import DataError
from klamp.inspect import runlog, settings


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run among those of a report."""

    name: str
    log: runlog.RunLog
    settings: settings.Settings


def read(paths: Sequence[Path]) -> tuple[Run, ...]:
    """The runs in the given order, under names that tell them apart."""
    if not paths:
        raise DataError("a report needs the directory of at least one run, got none")
    return tuple(
        Run(name=name, log=runlog.read(path), settings=settings.read(path))
        for name, path in zip(names(paths), paths, strict=True)
    )


def names(paths: Sequence[Path]) -> list[str]:
    """The directories' own names, with as many of their parents as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for index, own in enumerate(parts):
        if own in parts[:index]:
            raise DataError(f"{paths[index]} is given twice; name each run of a report once")
    return [shortest(own, [p for p in parts if p != own]) for own in parts]


def shortest(own: tuple[str, ...], others: list[tuple[str, ...]]) -> str:
    """The shortest end of a path that no other path has."""
    for length in range(1, len(own)):
        if all(own[-length:] != other[-length:] for other in others):
            return "/".join(own[-length:])
    return str(Path(*own))
