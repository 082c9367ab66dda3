"""Metrics to trackers besides metrics.jsonl: TensorBoard, Weights & Biases, trackio."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from klamp.errors import ConfigError
from klamp.train.settings import TrackingSettings


@runtime_checkable
class Tracker(Protocol):
    """Somewhere that metrics are sent to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step."""
        ...

    def close(self) -> None:
        """Everything is sent when this returns."""
        ...


class TensorBoard:
    """Event files in RUN/tensorboard; a resumed run hides the steps that it makes again."""

    def __init__(self, run: Path, first_step: int) -> None:
        writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(run / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Weights & Biases; ``WANDB_MODE=offline`` keeps it on this machine, under RUN/wandb."""

    def __init__(self, run: Path, project: str, config: Mapping[str, Any]) -> None:
        wandb = _import("wandb", "wandb")
        self._run = wandb.init(
            project=project, name=run.name, dir=str(run), config=dict(config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """trackio, which is local first."""

    def __init__(self, run: Path, project: str, config: Mapping[str, Any]) -> None:
        self._trackio = _import("trackio", "trackio")
        self._trackio.init(project=project, name=run.name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


def trackers(
    settings: TrackingSettings, run: Path, config: Mapping[str, Any], first_step: int
) -> list[Tracker]:
    """The trackers that a config asks for."""
    found: list[Tracker] = []
    if settings.tensorboard:
        found.append(TensorBoard(run, first_step))
    if settings.wandb is not None:
        found.append(WandB(run, settings.wandb, config))
    if settings.trackio is not None:
        found.append(Trackio(run, settings.trackio, config))
    return found


def _import(module: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking.{extra} needs {extra}; `pip install klamp[{extra}]`"
        ) from error
