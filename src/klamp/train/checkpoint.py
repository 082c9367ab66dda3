"""Checkpoints: a directory per step, and a file LATEST that names the last whole one.

    checkpoints/step-000030/{policy,value}.safetensors  weights that are trained
    checkpoints/step-000030/optimizer.pt                AdamW's moments, the schedule
    checkpoints/step-000030/state.json                  step, objective state, skipped updates
    checkpoints/LATEST                                  "step-000030", renamed into place last

Random numbers need no place here: every step seeds its own from (seed, step, rank), and the
training stream is addressed by the step's number.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klamp.errors import DataError
from klamp.inspect.files import write_directory, write_text
from klamp.objective.state import ObjectiveState
from klamp.train.models import Models

LATEST = "LATEST"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: everything that moves besides weights and moments."""

    step: int
    state: ObjectiveState
    skipped: int = 0
    """Non-finite updates in a row."""


def save(run: Path, models: Models, optimizer: Any, progress: Progress, *, keep: int) -> None:
    """A whole checkpoint, then LATEST; older ones than the last ``keep`` go."""
    place = run / "checkpoints" / f"step-{progress.step:06d}"
    write_directory(place, lambda partial: _write(partial, models, optimizer, progress))
    write_text(place.parent / LATEST, place.name + "\n")
    older = sorted(p for p in place.parent.glob("step-*") if p.name < place.name)
    for path in older[: max(0, len(older) - keep + 1)]:
        shutil.rmtree(path)


def latest(run: Path) -> Path | None:
    """The last whole checkpoint; None where there is none yet."""
    pointer = run / "checkpoints" / LATEST
    if not pointer.is_file():
        return None
    place = pointer.parent / pointer.read_text().strip()
    if not (place / "state.json").is_file():
        raise DataError(
            f"{pointer} names {place.name}, which is not there; was it removed by hand?"
        )
    return place


def restore(place: Path, models: Models, optimizer: Any) -> Progress:
    """Weights and moments put in place; how far the run was."""
    from safetensors.torch import load_file

    device = str(models.device)
    if (models.value is not None) != (place / "value.safetensors").is_file():
        raise DataError(
            f"{place} has {'no' if models.value is not None else 'a'} value function, the config "
            f"asks for {'one' if models.value is not None else 'none'}; use the run's own config"
        )
    _fill(models.policy, load_file(place / "policy.safetensors", device=device), place)
    if models.value is not None:
        _fill(models.value, load_file(place / "value.safetensors", device=device), place)
    moments = torch.load(place / "optimizer.pt", map_location=device)["state"]
    # The groups' settings are the config's: a rate that was changed on resume holds.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    raw: dict[str, Any] = json.loads((place / "state.json").read_text())
    return Progress(
        step=raw["step"], state=ObjectiveState.from_dict(raw["state"]), skipped=raw["skipped"]
    )


def _write(place: Path, models: Models, optimizer: Any, progress: Progress) -> None:
    from safetensors.torch import save_file

    save_file(trained(models.policy), place / "policy.safetensors")
    if models.value is not None:
        save_file(trained(models.value), place / "value.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    about = {"step": progress.step, "skipped": progress.skipped, "state": progress.state.to_dict()}
    (place / "state.json").write_text(json.dumps(about, indent=1))


def trained(network: torch.nn.Module) -> dict[str, Tensor]:
    """The weights that are trained, by name; tied ones once."""
    named = network.named_parameters()
    return {n: p.detach().contiguous() for n, p in named if p.requires_grad}


def _fill(network: torch.nn.Module, weights: dict[str, Tensor], place: Path) -> None:
    own = {n: p for n, p in network.named_parameters() if p.requires_grad}
    sizes = {n: p.shape for n, p in own.items()}, {n: w.shape for n, w in weights.items()}
    if sizes[0] != sizes[1]:
        other = sorted(name for name, _ in sizes[0].items() ^ sizes[1].items())[0]
        raise DataError(
            f"{place} is of another model: they differ in {other!r}; use its own config"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
