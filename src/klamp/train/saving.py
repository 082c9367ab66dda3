"""The trained policy as a Hugging Face model directory."""

import copy
from pathlib import Path
from typing import Any

from klamp.inspect.files import write_directory
from klamp.train.models import Models


def save_model(models: Models, run: Path) -> Path:
    """RUN/model, loaded by ``from_pretrained``; with LoRA merged, and the adapter beside it."""
    policy: Any = models.policy
    adapted = hasattr(policy, "merge_and_unload")
    if adapted:
        write_directory(run / "adapter", lambda place: policy.save_pretrained(place))
        policy = copy.deepcopy(policy).merge_and_unload()

    def write(place: Path) -> None:
        policy.save_pretrained(place)
        models.tokenizer.save_pretrained(place)

    return write_directory(run / "model", write)
