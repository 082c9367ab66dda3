"""A run that was killed, stopped or told to stop goes on as if nothing had happened.

The moments are audited events of the interpreter, just before they happen, so that each test kills
its run at the same point on any machine.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_parts import CONFIGS, TINY
from trainer_processes import at, finished, is_stopped, klamp, start, wait_until

from klamp.inspect import runlog

SETS = [
    word
    for override in (
        *(*TINY, "steps=6", "evaluation.every=2"),
        *("checkpoints.every=2", "checkpoints.keep=1"),
    )
    for word in ("--set", override)
]
RUNNING = (
    "objective={preset: trlx, scale_reward: running, init_kl_coef: 0.1, target: 1.0, horizon: 64}"
)
CHANCE = Path(__file__).parent / "chance.py"
KINDS = {
    "grpo": (),
    "ppo": (CONFIGS / "ppo.yaml",),
    "running statistics": ("--set", RUNNING, "--set", "model.value=shared"),
    "adapter": ("--set", "model.lora={rank: 4}"),
    "epochs": ("--set", "optimizer.epochs=2", "--set", "optimizer.updates_per_epoch=2"),
    "outliers": (CONFIGS / "outliers.yaml", "--set", "reward.outliers.fraction=0.3"),
    "a reward of chance": ("--set", f"reward.function={CHANCE}:chance"),
}


def told(place):
    """The lines of the log, without timings."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
        line["metrics"] = {k: v for k, v in line["metrics"].items() if not k.startswith("time/")}
    return lines


def contents(place):
    """Every file by its path: bytes, the log without timings, the report only by being there."""
    found = {}
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        name = str(path.relative_to(place))
        timed = {
            "metrics.jsonl": told,
            "report.html": lambda _: "there",
            ".lock": lambda _: "there",
        }
        found[name] = timed[name](place) if name in timed else path.read_bytes()
    return found


def same(place, undisturbed):
    """Whether two runs have left the same files with the same in them, and which differ."""
    one, other = contents(place), contents(undisturbed)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Runs of each kind that nothing happened to, made when first asked for."""
    made = {}

    def run(kind="grpo"):
        if kind not in made:
            place = tmp_path_factory.mktemp("undisturbed") / "run"
            code, said = klamp("train", *KINDS[kind], *SETS, "--out", place, log=f"{place}.log")
            assert code == 0, said
            made[kind] = place
        return made[kind]

    return run


@pytest.fixture
def place(tmp_path):
    return tmp_path / "run"


def begun(place, moment, kind="grpo"):
    return klamp("train", *KINDS[kind], *SETS, "--out", place, log=f"{place}.log", moment=moment)


def resumed(place, *more, moment=None):
    return klamp("train", "--resume", place, *more, log=f"{place}.log", moment=moment)


def steps(place):
    return [line["step"] for line in told(place)] if (place / "metrics.jsonl").exists() else None


def latest(place):
    pointer = place / "checkpoints" / "LATEST"
    return pointer.read_text().strip() if pointer.exists() else None


def test_the_command_itself_does_what_its_forked_copies_do(undisturbed, place):
    command = [sys.executable, "-m", "klamp.cli", "train", *SETS, "--out", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert steps(place) == [1, 2, 3, 4, 5, 6]
    same(place, undisturbed())


def before_line(number, **how):
    """Just before a run that was not resumed writes a line."""
    return at("open", "*/metrics.jsonl", nth=number, **how)


HALF = "*/.step-000004.partial/state.json"
ALL = [1, 2, 3, 4, 5, 6]
# With what was on disk when the process was killed: the lines, and what LATEST says.
MOMENTS = {
    "before the log": (at("open", "*/.metrics.jsonl.partial"), None, None),
    "before the config": (at("os.rename", "*/config.yaml"), [], None),
    "in the first evaluation": (at("open", "*/.step-000000.json.partial"), [], None),
    "before the first line": (before_line(1), [], None),
    "before the first checkpoint": (at("open", "*/.step-000002.partial/*"), [1, 2], None),
    "before the first LATEST": (at("os.rename", "*/LATEST"), [1, 2], None),
    "before a line": (before_line(4), [1, 2, 3], "step-000002"),
    "before an evaluation": (at("os.rename", "*/step-000004.json"), [1, 2, 3], "step-000002"),
    "in a checkpoint": (at("open", HALF), [1, 2, 3, 4], "step-000002"),
    "before its name": (at("os.rename", "*/step-000004"), [1, 2, 3, 4], "step-000002"),
    "before LATEST": (at("os.rename", "*/LATEST", nth=2), [1, 2, 3, 4], "step-000002"),
    "after LATEST": (at("shutil.rmtree", "*/step-000002", nth=2), [1, 2, 3, 4], "step-000004"),
    "while an old one goes": (at("os.remove", "*optimizer.pt"), [1, 2, 3, 4], "step-000004"),
    "before the model": (at("os.rename", "*/model"), ALL, "step-000006"),
    "before the report": (at("os.rename", "*/report.html"), ALL, "step-000006"),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_a_run_that_is_killed_at_any_moment_goes_on_as_if_it_had_not_been(undisturbed, place, name):
    moment, lines, last = MOMENTS[name]
    code, said = begun(place, moment)
    assert code == -signal.SIGKILL, said
    assert (steps(place), latest(place)) == (lines, last)
    if not (place / "config.yaml").exists():  # nothing to resume: it is begun again
        code, said = begun(place, None)
    else:
        code, said = resumed(place)
    assert code == 0, said
    same(place, undisturbed())


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "grpo"])
def test_every_kind_of_run_resumes_exactly(undisturbed, place, kind):
    code, said = begun(place, at("os.rename", "*/step-000006"), kind)
    assert code == -signal.SIGKILL, said
    assert latest(place) == "step-000004"
    assert resumed(place)[0] == 0
    same(place, undisturbed(kind))


def test_what_a_stage_and_a_controller_remember_is_in_the_checkpoint(undisturbed):
    path = undisturbed("running statistics") / "checkpoints" / "step-000006" / "state.json"
    state = json.loads(path.read_text())["state"]
    counts = [m for stage in state["stages"] if stage for _, m in stage]
    assert [m["count"] for m in counts] == [6 * 16]
    assert state["control"]["coef"] != 0.1


def test_a_run_can_be_killed_again_and_again(undisturbed, place):
    assert begun(place, before_line(4))[0] == -signal.SIGKILL
    for _ in range(2):  # the log is read once, then each time one step is made again
        moment = at("open", "*/metrics.jsonl", nth=3)
        assert resumed(place, moment=moment)[0] == -signal.SIGKILL
        assert steps(place) == [1, 2, 3]
    assert resumed(place, moment=at("os.rename", "*/LATEST"))[0] == -signal.SIGKILL
    assert resumed(place)[0] == 0
    same(place, undisturbed())


def test_a_kill_from_outside_at_no_particular_moment(undisturbed, place):
    process = start(["train", *SETS, "--out", place], f"{place}.log")
    wait_until(lambda: steps_now(place) >= 3, "three lines")
    process.kill()
    assert finished(process) in (-signal.SIGKILL, 0)
    assert resumed(place)[0] == 0
    same(place, undisturbed())


def steps_now(place):
    log = place / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def test_a_torn_last_line_is_cut_away(undisturbed, place):
    assert begun(place, before_line(4))[0] == -signal.SIGKILL
    with (place / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "seconds": 0.1, "metr')
    assert resumed(place)[0] == 0
    same(place, undisturbed())


def test_a_latest_that_names_nothing_is_refused_in_one_sentence(undisturbed, place):
    shutil.copytree(undisturbed(), place)
    (place / "checkpoints" / "LATEST").write_text("step-000005\n")
    before = contents(place)
    code, said = resumed(place)
    assert code == 2 and "klamp: " in said and "Traceback" not in said
    assert "LATEST names step-000005, which is not there" in said
    assert contents(place) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_saves_its_step_and_says_how_to_go_on(
    undisturbed, place, number
):
    code, said = begun(place, before_line(3, send=number))
    assert code == 130
    assert steps(place) == [1, 2, 3] and latest(place) == "step-000003"
    assert f"stopped after step 3 of 6; everything is saved in {place}" in said
    assert f"go on with: klamp train --resume {place}" in said
    assert (place / "report.html").exists() and not (place / "model").exists()
    assert resumed(place)[0] == 0
    same(place, undisturbed())


def interrupted_twice(place):
    """A run that got both signals while it was writing a checkpoint; its exit code and words."""
    log = f"{place}.log"
    moment = at("open", HALF, send=signal.SIGSTOP)
    process = start(["train", *SETS, "--out", place], log, moment)
    wait_until(lambda: is_stopped(process), "the checkpoint of step 4")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(process.pid, number)
    code = finished(process)
    with open(log) as said:
        return code, said.read()


def test_a_second_signal_ends_the_run_at_once(undisturbed, place):
    assert interrupted_twice(place)[0] == 130
    assert latest(place) == "step-000002" and steps(place) == [1, 2, 3, 4]
    assert resumed(place)[0] == 0
    same(place, undisturbed())


def test_a_run_that_ends_at_once_says_how_to_go_on(place):
    assert "klamp: stopped at once; `klamp train --resume" in interrupted_twice(place)[1]


def test_resuming_a_finished_run_is_harmless(undisturbed, place):
    shutil.copytree(undisturbed(), place)
    code, said = resumed(place)
    assert code == 0 and "step 1/6" not in said
    same(place, undisturbed())


def test_a_second_process_in_the_directory_is_refused_and_does_no_harm(undisturbed, place):
    """The first one is in the middle of writing a checkpoint."""
    first = start(
        ["train", *SETS, "--out", place],
        f"{place}-first.log",
        at("open", HALF, send=signal.SIGSTOP),
    )
    wait_until(lambda: is_stopped(first), "the checkpoint of step 4")
    code, said = resumed(place)
    assert code == 2 and f"klamp: another process is training in {place}" in said
    os.kill(first.pid, signal.SIGCONT)
    assert finished(first) == 0
    same(place, undisturbed())


def test_a_longer_run_can_be_made_of_a_finished_one(undisturbed, place):
    shutil.copytree(undisturbed(), place)
    code, said = resumed(place, "--set", "steps=8")
    assert code == 0, said
    assert steps(place) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert told(place)[:6] == told(undisturbed())
    assert runlog.read(place).evaluations[-1].step == 8
    assert "steps: 8" in (place / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume", "{}"], "is not a run to resume: it has no config.yaml"),
        (["--resume", "{}", "--out", "x"], "goes on with that run's own config"),
        (["config.yaml", "--resume", "{}"], "goes on with that run's own config"),
    ],
    ids=["no run", "--out", "a config"],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, arguments, said):
    given = [a.format(tmp_path) for a in arguments]
    code, found = klamp("train", *given, log=tmp_path / "log")
    assert code == 2 and said in found and "Traceback" not in found
