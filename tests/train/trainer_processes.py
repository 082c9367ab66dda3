"""Processes of their own for the command line and for ranks, forked from one that has imported.

A cold `python -m klamp.cli` spends four of its five seconds importing; one test pays for that. The
others get a process that is as real (it can be killed, stopped and interrupted) for a tenth of it.
"""

import contextlib
import fnmatch
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["klamp.train.launch", "klamp.cli", "peft", "pytest", __name__])
PATIENCE = 120  # seconds


def start(arguments, log, moment=None, environment=None, cwd="."):
    """`klamp ARGUMENTS` in a process of its own, which writes what it says into ``log``."""
    given = ([str(a) for a in arguments], str(log), moment, environment or {}, str(cwd))
    process = FORKS.Process(target=_command, args=given, daemon=True)
    process.start()
    return process


def finished(process):
    """The exit code of a process; minus the signal's number where one ended it."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError("the process did not end")
    return process.exitcode


def klamp(*arguments, log, moment=None):
    """The exit code of `klamp ARGUMENTS`, and everything that it said."""
    code = finished(start(arguments, log, moment))
    return code, Path(log).read_text()


def ranks(function, place, *arguments, size=2):
    """What ``function(rank, *arguments)`` returns in each of ``size`` processes joined by gloo."""
    port = free_port()
    found = []
    for rank in range(size):
        given = (function, rank, size, port, str(place), arguments)
        found.append(FORKS.Process(target=_rank, args=given, daemon=True))
        found[-1].start()
    codes = [finished(process) for process in found]
    said = "".join(p.read_text() for p in sorted(Path(place).glob("rank-*.log")))
    assert codes == [0] * size, said
    return [torch.load(Path(place) / f"rank-{rank}.pt") for rank in range(size)]


def klamp_ranks(*arguments, place, size=2, moments=(), cwd="."):
    """(exit code, what it said) of each of ``size`` processes, started as torchrun starts them."""
    port = free_port()
    found = [
        start(
            arguments,
            Path(place) / f"rank-{rank}.log",
            dict(moments).get(rank),
            _addressed(rank, size, port),
            cwd,
        )
        for rank in range(size)
    ]
    return [(finished(p), (Path(place) / f"rank-{r}.log").read_text()) for r, p in enumerate(found)]


def at(event, pattern, *, nth=1, send=signal.SIGKILL):
    """A moment: just before the nth audited event (open, os.rename, …) on a path like ``pattern``.

    The process sends the signal to itself, so the moment is the same on every machine.
    """
    return event, pattern, nth, int(send)


def wait_until(condition, what):
    """Until something has happened in another process."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.005)


def is_stopped(process):
    """Whether a process sleeps after SIGSTOP."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _command(arguments, log, moment, environment, cwd):
    from klamp import cli

    _speak_into(log)
    os.environ.update(environment)
    os.chdir(cwd)
    if moment is not None:
        sys.addaudithook(_Trap(*moment))
    sys.argv = ["klamp", *arguments]
    cli.main()


def _rank(function, rank, size, port, place, arguments):
    _speak_into(f"{place}/rank-{rank}.log")
    torch.set_num_threads(1)
    os.environ.update(_addressed(rank, size, port))
    try:
        torch.save(function(rank, *arguments), f"{place}/rank-{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise


def _addressed(rank, size, port):
    """What torchrun tells a process about the others."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
    }


def _speak_into(log):
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(handle, number)


class _Trap:
    """Sends this process a signal at a moment."""

    def __init__(self, event, pattern, nth, send):
        self.event, self.pattern, self.left, self.send = event, pattern, nth, send

    def __call__(self, event, arguments):
        if event != self.event or self.left <= 0:
            return
        if any(fnmatch.fnmatch(str(a), self.pattern) for a in arguments):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.send)
