import importlib.util
import sys
from importlib import import_module

import pytest

from klamp.errors import ConfigError
from klamp.train.settings import TrackingSettings
from klamp.train.tracking import TensorBoard, Tracker, trackers

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("wandb", "trackio")}
LINES = {1: {"critic/kl": 0.5, "task/accuracy": 0.25}, 2: {"critic/kl": 0.75}}


def sent(tracker, lines):
    for step, metrics in lines.items():
        tracker.log(step, metrics)
    tracker.close()


def read_back(run):
    """{metric: [(step, value), …]} as TensorBoard itself reads the event files."""
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    names = found.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in names}


def test_nothing_is_tracked_unless_asked_for(tmp_path):
    assert trackers(TrackingSettings(), tmp_path, {}, 1) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    (tracker,) = trackers(TrackingSettings(tensorboard=True), tmp_path, {}, 1)
    assert isinstance(tracker, TensorBoard) and isinstance(tracker, Tracker)
    sent(tracker, LINES)
    assert read_back(tmp_path) == {
        "critic/kl": [(1, 0.5), (2, 0.75)],
        "task/accuracy": [(1, 0.25)],
    }


def test_a_resumed_run_hides_the_steps_that_it_makes_again(tmp_path):
    pytest.importorskip("tensorboard")
    sent(TensorBoard(tmp_path, 1), {step: {"critic/kl": 1.0} for step in (1, 2, 3)})
    sent(TensorBoard(tmp_path, 3), {step: {"critic/kl": 2.0} for step in (3, 4)})
    assert read_back(tmp_path) == {"critic/kl": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]}


@pytest.mark.parametrize("name", INSTALLED)
def test_a_tracker_that_is_not_installed_names_the_extra(name, tmp_path):
    if INSTALLED[name]:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ConfigError) as said:
        trackers(TrackingSettings(**{name: "project"}), tmp_path, {}, 1)
    assert str(said.value) == f"tracking.{name} needs {name}; `pip install klamp[{name}]`"


def test_tensorboard_that_is_not_installed_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tracking.tensorboard needs tensorboard; `pip install"):
        trackers(TrackingSettings(tensorboard=True), tmp_path, {}, 1)


def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tracker,) = trackers(TrackingSettings(wandb="klamp-tests"), tmp_path, {"steps": 2}, 1)
    sent(tracker, LINES)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_trackio_works_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tracker,) = trackers(TrackingSettings(trackio="klamp-tests"), tmp_path, {"steps": 2}, 1)
    sent(tracker, LINES)
    assert list((tmp_path / "trackio").glob("klamp-tests*"))
