"""How processes start, and how a run ends: here, or one of several under torchrun."""

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import torch

from klamp.errors import ConfigError
from klamp.inspect import render, runlog
from klamp.inspect.files import write_text
from klamp.train import saving, trainer
from klamp.train.checkpoint import Progress
from klamp.train.comm import Comm, Distributed, OneProcess
from klamp.train.config import Config, dump
from klamp.train.trainer import Watch


class Interrupt:
    """Ctrl-C or SIGTERM: the step is finished and saved; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Whether somebody asked to stop."""
        return self.asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def launch(config: Config, place: Path, watch: Watch) -> Progress:
    """Train in ``place`` in this process, or as one of torchrun's; then write model and report."""
    with processes() as comm, alone_in(place, comm), interruptible() as stop:
        check_cut(config, comm)
        run = trainer.set_up(config, place, comm)
        progress = trainer.resume(run)
        if comm.rank == 0:  # only now: a config that is refused must not spoil a run
            write_text(place / "config.yaml", dump(config))
        progress = trainer.train(run, progress, watch if comm.rank == 0 else unwatched, stop)
        if progress.step >= config.steps and comm.rank == 0:
            saving.save_model(run.models, place)
        if progress.step and comm.rank == 0:
            render.write([place])
        comm.wait()
    return progress


def is_first() -> bool:
    """Whether this process speaks for the run; torchrun's first one does."""
    return int(os.environ.get("RANK", "0")) == 0


def forget(place: Path) -> None:
    """Remove the directory of a run that failed before its first step."""
    if not any(runlog.lines(place / runlog.METRICS)):
        shutil.rmtree(place, ignore_errors=True)


def unwatched(*_: object) -> None:
    """What the other processes show: nothing."""


def new_place(out: Path | None, name: str) -> Path:
    """An empty directory for a new run: ``out``, or the next free ``runs/name-N``."""
    if out is not None:
        if any(runlog.lines(out / runlog.METRICS)):
            raise ConfigError(
                f"{out} already holds a run; go on with it by `klamp train --resume {out}`, or "
                "give another --out"
            )
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}; give a directory") from error
        return out
    if os.environ.get("RANK") is not None:
        raise ConfigError("several processes must agree on a run directory; give --out DIR")
    number = 1
    while True:
        place = Path("runs") / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            return place
        number += 1


def check_cut(config: Config, comm: Comm) -> None:
    """Prompts go evenly over processes."""
    if config.sampling.prompts % comm.size:
        raise ConfigError(
            f"sampling.prompts is {config.sampling.prompts}, which {comm.size} processes cannot "
            f"share evenly; use a multiple of {comm.size}"
        )


@contextlib.contextmanager
def processes() -> Generator[Comm]:
    """The processes of this run: torchrun's where it started us, else this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield OneProcess()
        return
    torch.distributed.init_process_group()
    try:
        yield Distributed(torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def alone_in(place: Path, comm: Comm) -> Generator[None]:
    """One run at a time writes to a directory."""
    if comm.rank != 0:
        yield
        return
    with (place / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is training in {place}; wait for it, or give another --out"
            ) from error
        for partial in place.glob("**/.*.partial"):  # of a process that was killed
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        yield


@contextlib.contextmanager
def interruptible() -> Generator[Interrupt]:
    """SIGINT and SIGTERM ask the loop to stop after its step."""
    stop = Interrupt()
    before = {n: signal.signal(n, stop.handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
