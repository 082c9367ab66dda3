"""Recorded batches: the tensors of one step, with what was being done to them.

RUN/records/step-000012/batch.safetensors   every tensor by name
RUN/records/step-000012/record.json         reason, state, prompts, completions

The objective is in the run's config.yaml.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from klamp.errors import DataError
from klamp.inspect.files import sync

TENSORS, ABOUT = "batch.safetensors", "record.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One recorded batch."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


def write(place: Path, record: Record) -> None:
    """The record as a directory that is there as a whole or not at all."""
    from safetensors.torch import save_file

    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({k: x.detach().contiguous() for k, x in record.tensors.items()}, partial / TENSORS)
    (partial / ABOUT).write_text(json.dumps(record.about, indent=1, ensure_ascii=False) + "\n")
    for path in (partial / TENSORS, partial / ABOUT, partial):
        sync(path)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(partial, place)


def read(place: Path) -> Record:
    """The inverse of ``write``."""
    from safetensors.torch import load_file

    if not (place / ABOUT).is_file():
        raise DataError(f"{place} is no recorded batch: it has no {ABOUT}; look in RUN/records/")
    about: dict[str, Any] = json.loads((place / ABOUT).read_text())
    return Record(tensors=load_file(place / TENSORS), about=about)
