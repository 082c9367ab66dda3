"""Recorded batches: the tensors of one step, with what was being done to them.

RUN/records/step-000012/batch.safetensors   every tensor by name
RUN/records/step-000012/record.json         reason, state, prompts, completions

The objective is in the run's config.yaml.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from klamp.errors import DataError
from klamp.inspect.files import write_directory

TENSORS, ABOUT = "batch.safetensors", "record.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One recorded batch."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


def write(place: Path, record: Record) -> None:
    """The record as a directory that is there as a whole or not at all."""
    from safetensors.torch import save_file

    tensors = {k: x.detach().contiguous() for k, x in record.tensors.items()}
    about = json.dumps(record.about, indent=1, ensure_ascii=False) + "\n"

    def fill(partial: Path) -> None:
        save_file(tensors, partial / TENSORS)
        (partial / ABOUT).write_bytes(about.encode("utf-8", "replace"))

    write_directory(place, fill)


def read(place: Path) -> Record:
    """The inverse of ``write``."""
    from safetensors.torch import load_file

    if not (place / ABOUT).is_file():
        raise DataError(f"{place} is no recorded batch: it has no {ABOUT}; look in RUN/records/")
    about: dict[str, Any] = json.loads((place / ABOUT).read_text())
    return Record(tensors=load_file(place / TENSORS), about=about)
