"""Files that are never half there: written under another name, synced, renamed into place."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """The whole text, or the file as it was before."""
    write_with(path, lambda partial: partial.write_bytes(text.encode("utf-8", "replace")))


def write_json(path: Path, value: Any) -> None:
    """A plain value as indented JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_with(path: Path, write: Callable[[Path], Any]) -> None:
    """Whatever ``write`` makes at the path it is given, moved to ``path`` once it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def write_directory(place: Path, write: Callable[[Path], Any]) -> Path:
    """Whatever files ``write`` puts into the directory it is given, as a whole at ``place``."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    for path in (*partial.iterdir(), partial):
        sync(path)
    shutil.rmtree(place, ignore_errors=True)  # of a time before, which is being made again
    os.replace(partial, place)
    sync(place.parent)
    return place


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
