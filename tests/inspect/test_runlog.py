import json
import os

import pytest

from klamp.errors import DataError
from klamp.inspect import runlog
from klamp.inspect.runlog import Completion, Evaluation, Step

STEPS = tuple(
    Step(
        step=n,
        seconds=0.1 * n,
        metrics={"critic/kl": n / 8, "β": 1e-9} | ({"odd": 1.0} if n % 2 else {}),
    )
    for n in range(1, 5)
)
SAMPLE = Completion(prompt="s21=\n", completion="β", answer=None, score=None, correct=None)


def evaluation(step):
    known = Completion(prompt="s21=", completion="12", answer="12", score=1.0, correct=True)
    return Evaluation(step=step, metrics={"eval/score": 0.5}, samples=(known, SAMPLE))


@pytest.fixture
def run(tmp_path):
    for step in STEPS:
        runlog.append(tmp_path, step)
    for step in (0, 2, 4):
        runlog.write_evaluation(tmp_path, evaluation(step))
    return tmp_path


def test_a_log_is_read_as_it_was_written(run):
    found = runlog.read(run)
    assert found.path == run and found.steps == STEPS
    assert found.evaluations == (evaluation(0), evaluation(2), evaluation(4))


def test_a_line_is_the_json_of_the_contract(run):
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {
        "step": 1,
        "seconds": 0.1,
        "metrics": {"critic/kl": 0.125, "β": 1e-9, "odd": 1.0},
    }


def test_an_evaluation_has_a_file_of_its_own(run):
    assert sorted(os.listdir(run / "evaluations")) == [
        "step-000000.json",
        "step-000002.json",
        "step-000004.json",
    ]


def test_evaluations_come_in_the_order_of_their_steps(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for step in (10, 9, 100):
        runlog.write_evaluation(tmp_path, evaluation(step))
    assert [e.step for e in runlog.read(tmp_path).evaluations] == [9, 10, 100]


def test_a_series_has_the_steps_that_have_the_metric(run):
    log = runlog.read(run)
    assert log.series("critic/kl") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert log.series("odd") == [(1, 1.0), (3, 1.0)]
    assert log.series("none") == []


def test_wherever_the_machine_goes_down_the_whole_lines_are_read(run):
    """Every length that the file can have been cut to."""
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = sum(end <= length for end in ends)
        assert tuple(runlog.lines(path)) == STEPS[:whole]


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 5, "sec'])
def test_cut_forgets_what_came_after_a_step(run, step, torn):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(torn)
    runlog.cut(run, step)
    runlog.append(run, after := Step(step=step + 1, seconds=1.0, metrics={}))
    found = runlog.read(run)
    assert found.steps == (*STEPS[:step], after)
    assert [e.step for e in found.evaluations] == [n for n in (0, 2, 4) if n <= step]


def test_cutting_nothing_changes_no_byte(run):
    before = (run / "metrics.jsonl").read_bytes()
    runlog.cut(run, 4)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_cut_makes_a_log_where_there_was_none(tmp_path):
    runlog.cut(tmp_path, 0)
    assert runlog.read(tmp_path).steps == ()


def test_a_line_is_one_write_and_on_disk_when_append_returns(tmp_path, monkeypatch):
    happened = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: (happened.append("write"), write(*a))[1])
    monkeypatch.setattr(os, "fsync", lambda *a: (happened.append("fsync"), fsync(*a))[1])
    runlog.append(tmp_path, STEPS[0])
    assert happened == ["write", "fsync"]


def test_append_keeps_no_handle_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    runlog.append(tmp_path, STEPS[0])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_without_a_log_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no metrics\.jsonl: not the directory of a run"):
        runlog.read(tmp_path)


@pytest.mark.parametrize(
    "damaged",
    ["nonsense", "", "[]", "{}", '{"step": 2, "metrics": {}}', "3"],
    ids=["no JSON", "empty", "list", "no step", "no seconds", "number"],
)
def test_a_damaged_line_that_is_not_the_last_is_named(run, damaged):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], damaged, *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not a step of a log"):
        runlog.read(run)


@pytest.mark.parametrize("content", [b'{"step": 1, "seconds": 1, "metrics": 3}\n', b"\xff\n"])
def test_a_log_of_another_kind_is_refused(tmp_path, content, as_users_run_it):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(DataError):
        runlog.read(tmp_path)


@pytest.mark.parametrize(
    "content", ['{"st', "{}", "[]", '{"step": 0, "metrics": {}, "samples": [1]}']
)
def test_a_damaged_evaluation_is_named(run, content):
    (run / "evaluations" / "step-000002.json").write_text(content)
    with pytest.raises(DataError, match=r"step-000002\.json"):
        runlog.read(run)
