"""The trained policy as a Hugging Face model directory."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

from klamp.inspect.files import sync
from klamp.train.models import Models


def save_model(models: Models, run: Path) -> Path:
    """RUN/model, loaded by ``from_pretrained``; with LoRA merged, and the adapter beside it."""
    policy: Any = models.policy
    adapted = hasattr(policy, "merge_and_unload")
    if adapted:
        _replace(run / "adapter", lambda place: policy.save_pretrained(place))
        policy = copy.deepcopy(policy).merge_and_unload()

    def write(place: Path) -> None:
        policy.save_pretrained(place)
        models.tokenizer.save_pretrained(place)

    return _replace(run / "model", write)


def _replace(place: Path, write: Any) -> Path:
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write(partial)
    for path in (*partial.iterdir(), partial):
        sync(path)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(partial, place)
    return place
