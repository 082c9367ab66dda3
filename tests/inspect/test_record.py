import json
import os

import pytest
import torch

from klamp.errors import DataError
from klamp.inspect import record
from klamp.inspect.record import Record

ABOUT = {
    "step": 12,
    "reason": "old_logprobs is nan",
    "prompts": ["s21=", "β\n"],
    "state": {"a": [1.5]},
}


def tensors():
    return {
        "mask": torch.tensor([[True, False], [True, True]]),
        "groups": torch.tensor([0, 1]),
        "scores": torch.tensor([0.5, torch.nan]),
        "logprobs": torch.randn(2, 6)[:, ::2],  # not contiguous
        "values": torch.randn(2, 2, requires_grad=True),
        "half": torch.randn(2, 2).to(torch.bfloat16),
    }


@pytest.fixture
def place(tmp_path):
    return tmp_path / "records" / "step-000012"


def test_a_record_is_read_as_it_was_written(place):
    given = tensors()
    record.write(place, Record(tensors=given, about=ABOUT))
    found = record.read(place)
    assert found.about == ABOUT and found.tensors.keys() == given.keys()
    for name, tensor in given.items():
        torch.testing.assert_close(
            found.tensors[name], tensor.detach(), rtol=0, atol=0, equal_nan=True
        )


def test_only_the_record_is_there(place):
    record.write(place, Record(tensors=tensors(), about=ABOUT))
    assert os.listdir(place.parent) == ["step-000012"]
    assert sorted(os.listdir(place)) == ["batch.safetensors", "record.json"]
    assert "β" in (place / "record.json").read_text(encoding="utf-8")


def test_a_step_that_is_made_again_replaces_its_record(place):
    record.write(place, Record(tensors=tensors(), about=ABOUT))
    again = {"scores": torch.ones(1)}
    record.write(place, Record(tensors=again, about={"step": 12}))
    found = record.read(place)
    assert found.about == {"step": 12} and list(found.tensors) == ["scores"]


def test_a_record_is_there_as_a_whole_or_not_at_all(place):
    """A write that fails leaves what was there; what it leaves behind is not in the next one."""
    record.write(place, Record(tensors=tensors(), about=ABOUT))
    with pytest.raises(TypeError):
        record.write(place, Record(tensors={"x": torch.ones(1)}, about={"bad": object()}))
    assert record.read(place).about == ABOUT and len(record.read(place).tensors) == 6
    record.write(place, Record(tensors=tensors(), about={"step": 13}))
    assert os.listdir(place.parent) == ["step-000012"] and record.read(place).about["step"] == 13


def test_it_is_on_disk_before_it_has_its_name(place, monkeypatch):
    happened = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda h: (happened.append(os.path.basename(os.readlink(f"/proc/self/fd/{h}"))), fsync(h)),
    )
    monkeypatch.setattr(os, "replace", lambda *a: (happened.append("renamed"), replace(*a)))
    record.write(place, Record(tensors={"x": torch.ones(1)}, about={}))
    renamed = happened.index("renamed")
    assert {"batch.safetensors", "record.json", ".step-000012.partial"} <= set(happened[:renamed])


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"is no recorded batch: it has no record\.json; look in"):
        record.read(tmp_path)


def test_the_text_is_plain_json(place):
    record.write(place, Record(tensors=tensors(), about=ABOUT))
    assert json.loads((place / "record.json").read_bytes()) == ABOUT
