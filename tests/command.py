"""The command line as a test drives it: here, because that is fast, or in a process of its own."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from unittest import mock

from klamp.cli import main

TINY = (
    "steps=1",
    "sampling.prompts=2",
    "sampling.samples_per_prompt=4",
    "evaluation.prompts=16",
    "evaluation.shown=2",
    "threads=1",
)


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def refusal(self):
        """The one sentence of a refusal."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.startswith("klamp: ") and self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err + self.out
        return self.err.removeprefix("klamp: ").rstrip("\n")


def klamp(*words):
    """The command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["klamp", *map(str, words)]),
        mock.patch.dict(os.environ, {"COLUMNS": "200"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    return Said(code, plain(out.getvalue()), plain(err.getvalue()))


def sets(*overrides):
    """Overrides as words of a command."""
    return [word for override in overrides for word in ("--set", override)]


def train(out, *overrides, config=(), flags=()):
    """A run of a moment's length in ``out``; later overrides win."""
    return klamp("train", *config, "--out", out, *flags, *sets(*TINY, *overrides))


def process(*words):
    """The command in a process of its own, as a shell would start it."""
    done = subprocess.run(
        shell_words(words), env=quiet_cores(), capture_output=True, text=True, timeout=120
    )
    return Said(done.returncode, done.stdout, done.stderr)


def in_terminal(*words):
    """The command in a process of its own that writes to a terminal; everything is in ``out``."""
    ours, theirs = pty.openpty()
    words, environment = shell_words(words), quiet_cores()
    with subprocess.Popen(words, env=environment, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        late = threading.Timer(120, run.kill)
        late.start()
        drawn = b""
        with contextlib.suppress(OSError):  # which says that the other end is closed
            while part := os.read(ours, 65536):
                drawn += part
        code = run.wait()
        late.cancel()
    os.close(ours)
    return Said(code, drawn.decode(), "")


def shell_words(words):
    return [sys.executable, "-m", "klamp.cli", *map(str, words)]


def quiet_cores():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"}


def plain(text):
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def log_of(run):
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
