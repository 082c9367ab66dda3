"""How processes start, share a directory, are told to stop; torchrun."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from trainer_parts import TINY, tiny_config, tiny_run, weights
from trainer_processes import at, free_port, klamp_ranks, ranks

from klamp.errors import ConfigError
from klamp.inspect import runlog
from klamp.train import checkpoint, launch, trainer
from klamp.train.comm import Distributed, OneProcess

SETS = [
    word for override in (*TINY, "steps=3", "checkpoints.every=2") for word in ("--set", override)
]


def test_a_new_run_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = [launch.new_place(None, "default") for _ in range(3)]
    assert [str(p) for p in places] == ["runs/default-1", "runs/default-2", "runs/default-3"]
    assert all(p.is_dir() for p in places)
    assert launch.new_place(None, "ppo").name == "ppo-1"


def test_a_run_can_be_put_anywhere_that_is_free(tmp_path):
    place = tmp_path / "deep" / "down"
    assert launch.new_place(place, "x") == place and place.is_dir()
    (place / "notes.txt").write_text("mine")
    assert launch.new_place(place, "x") == place


LINE = runlog.Step(step=1, seconds=0.1, metrics={})


def test_a_directory_that_holds_a_run_is_refused_with_the_way_to_go_on(tmp_path):
    runlog.append(tmp_path, LINE)
    with pytest.raises(ConfigError, match=r"already holds a run.*`klamp train --resume .*--out"):
        launch.new_place(tmp_path, "x")


def test_a_run_that_never_made_a_step_is_no_run_to_be_kept(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / runlog.METRICS).write_text('{"step": 1, "sec')  # torn
    assert launch.new_place(tmp_path, "x") == tmp_path


@pytest.mark.parametrize("lines", [0, 1])
def test_a_failed_start_leaves_no_directory_but_a_step_stays(tmp_path, lines):
    place = launch.new_place(tmp_path / "run", "x")
    (place / "config.yaml").write_text("")
    for _ in range(lines):
        runlog.append(place, LINE)
    launch.forget(place)
    assert place.exists() == bool(lines)


def test_ranks_must_be_told_where_to_write(tmp_path):
    for code, said in klamp_ranks("train", *SETS, place=tmp_path, cwd=tmp_path):
        assert code == 2 and "must agree on a run directory; give --out DIR" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("prompts", "size"), [(4, 3), (4, 8), (1, 2)])
def test_prompts_that_processes_cannot_share_evenly_are_refused(prompts, size):
    config = tiny_config(f"sampling.prompts={prompts}")
    said = rf"^sampling.prompts is {prompts}, which {size} processes .* use a multiple of {size}$"
    with pytest.raises(ConfigError, match=said):
        launch.check_cut(config, Distributed(0, size))


@pytest.mark.parametrize(("prompts", "size"), [(4, 1), (4, 2), (4, 4), (9, 3)])
def test_prompts_that_processes_can_share_are_not(prompts, size):
    launch.check_cut(tiny_config(f"sampling.prompts={prompts}"), Distributed(0, size))


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launch.processes() as comm:
        assert comm == OneProcess()
    assert not torch.distributed.is_initialized()


def test_one_run_at_a_time_writes_to_a_directory(tmp_path):
    with launch.alone_in(tmp_path, OneProcess()):
        again = pytest.raises(
            ConfigError, match=r"^another process is training in .*another --out$"
        )
        with again, launch.alone_in(tmp_path, OneProcess()):
            pass
    with launch.alone_in(tmp_path, OneProcess()):  # the lock is gone with its owner
        pass


def test_the_other_ranks_of_a_run_do_not_lock_it(tmp_path):
    with (
        launch.alone_in(tmp_path, OneProcess()),
        launch.alone_in(tmp_path, Distributed(rank=1, size=2)),
    ):
        pass


def leftovers(place):
    (place / "checkpoints" / ".step-000004.partial").mkdir(parents=True)
    (place / "checkpoints" / ".step-000004.partial" / "optimizer.pt").write_text("half")
    (place / ".metrics.jsonl.partial").write_text("half")
    return lambda: sorted(str(p.relative_to(place)) for p in place.rglob(".*.partial"))


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    left = leftovers(tmp_path)
    (tmp_path / "notes.partial").write_text("mine")
    with launch.alone_in(tmp_path, OneProcess()):
        assert left() == []
    assert (tmp_path / "notes.partial").read_text() == "mine"


def test_what_a_living_process_is_writing_is_left_alone(tmp_path):
    left = leftovers(tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError), launch.alone_in(tmp_path, OneProcess()):
            pass
    assert len(left()) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_asks_and_a_second_one_ends_at_once(number):
    before = signal.getsignal(number)
    with launch.interruptible() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory):
    """A run that torchrun started on two processes: its directory, exit code and words."""
    place = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += ["-m", "klamp.cli", "train", *SETS, "--out", str(place / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return place / "run", done


def test_torchrun_trains_with_two_processes(by_torchrun):
    place, done = by_torchrun
    assert done.returncode == 0, done.stderr
    log = runlog.read(place)
    assert [line.step for line in log.steps] == [1, 2, 3]
    for line in log.steps:  # four prompts of four samples, over both
        assert line.metrics["signal/samples"] == 16
        assert line.metrics["signal/groups"] == 4
        assert line.metrics["actor/ratio_at_step0"] == pytest.approx(1.0, abs=1e-4)
    assert (place / "model" / "model.safetensors").is_file()
    assert (place / "report.html").is_file()
    assert done.stdout.count("step 3/3") == 1  # one process speaks
    assert done.stdout.count("true accuracy") == 1


def whole_run(rank, place):
    """A rank of the same run; its weights at the end, and its share of the first prompts."""
    with launch.processes() as comm:
        run = tiny_run(place / "run", "steps=3", "checkpoints.every=2", comm=comm)
        first = [e.prompt for e in trainer.sample(run, 1).examples[::4]]
        trainer.train(run, trainer.resume(run), launch.unwatched, lambda: False)
        return {"weights": weights(run.models.policy), "prompts": first}


def test_both_processes_end_with_the_weights_that_are_saved(by_torchrun, tmp_path):
    (tmp_path / "run").mkdir()
    one, two = ranks(whole_run, tmp_path, tmp_path)
    saved = load_file(checkpoint.latest(by_torchrun[0]) / "policy.safetensors")
    for name, x in saved.items():
        assert torch.equal(one["weights"][name], x)
        assert torch.equal(two["weights"][name], x)
    assert len({*one["prompts"], *two["prompts"]}) == 4


def test_ranks_share_the_prompts_of_a_step(tmp_path):
    alone = trainer.sample(tiny_run(tmp_path, comm=OneProcess()), 1)
    prompts = []
    for rank in range(2):
        made = trainer.sample(tiny_run(tmp_path, comm=Distributed(rank, 2)), 1)
        prompts += [e.prompt for e in made.examples]
    assert prompts == [e.prompt for e in alone.examples]


def test_torchrun_is_refused_prompts_that_do_not_go_evenly(tmp_path):
    arguments = ("train", *SETS, "--set", "sampling.prompts=3", "--out", tmp_path / "run")
    for code, said in klamp_ranks(*arguments, place=tmp_path):
        assert code == 2
        assert "klamp: sampling.prompts is 3, which 2 processes cannot share evenly" in said
        assert "Traceback" not in said


def comparable(log):
    """The lines of a log without what is timed."""
    return [
        (s.step, {n: x for n, x in s.metrics.items() if not n.startswith("time/")})
        for s in log.steps
    ]


def test_one_process_that_is_asked_to_stop_stops_all_and_they_go_on_together(by_torchrun, tmp_path):
    place = tmp_path / "run"
    moment = at("open", "*/metrics.jsonl", nth=2, send=signal.SIGINT)
    stopped = klamp_ranks("train", *SETS, "--out", place, place=tmp_path, moments=[(0, moment)])
    assert [code for code, _ in stopped] == [130, 130]
    assert len(runlog.read(place).steps) < 3
    resumed = klamp_ranks("train", "--resume", place, place=tmp_path)
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert comparable(runlog.read(place)) == comparable(runlog.read(by_torchrun[0]))
    one, two = (load_file(p / "model" / "model.safetensors") for p in (place, by_torchrun[0]))
    assert all(torch.equal(one[name], x) for name, x in two.items())
