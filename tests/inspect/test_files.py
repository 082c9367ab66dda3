import json
import os

import pytest

from klamp.inspect.files import sync, write_json, write_text, write_with


def test_the_whole_text_is_there_in_utf8_and_nothing_beside_it(tmp_path):
    write_text(tmp_path / "a" / "b" / "note.txt", "β → 0\n")
    assert (tmp_path / "a" / "b" / "note.txt").read_bytes() == "β → 0\n".encode()
    assert os.listdir(tmp_path / "a" / "b") == ["note.txt"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    write_text(tmp_path / "note.txt", "a long text that was here before")
    write_text(tmp_path / "note.txt", "short")
    assert (tmp_path / "note.txt").read_text() == "short"


def test_half_a_character_does_not_stop_the_file(tmp_path):
    write_text(tmp_path / "note.txt", "a\ud800b")
    assert (tmp_path / "note.txt").read_text(encoding="utf-8") == "a?b"


def test_plain_values_are_read_back_and_readable(tmp_path):
    value = {"step": 3, "text": "β", "list": [1.5, None, True]}
    write_json(tmp_path / "value.json", value)
    text = (tmp_path / "value.json").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "β" in text and text.count("\n") > 3 and text.endswith("}\n")


def test_a_writer_that_fails_leaves_the_file_as_it_was(tmp_path):
    def half(partial):
        partial.write_text("half of the n")
        raise OSError("the disk is full")

    write_text(tmp_path / "note.txt", "old")
    with pytest.raises(OSError, match="the disk is full"):
        write_with(tmp_path / "note.txt", half)
    assert (tmp_path / "note.txt").read_text() == "old"
    write_text(tmp_path / "note.txt", "new")  # what is left of the half does not get in the way
    assert os.listdir(tmp_path) == ["note.txt"] and (tmp_path / "note.txt").read_text() == "new"


def test_while_it_is_written_the_file_has_another_name_that_no_pattern_finds(tmp_path):
    seen = []
    write_with(
        tmp_path / "step-1.json",
        lambda partial: (partial.write_text("x"), seen.extend(tmp_path.glob("step-*"))),
    )
    assert seen == [] and (tmp_path / "step-1.json").exists()


def test_the_text_is_on_disk_before_the_name_and_then_the_name(tmp_path, monkeypatch):
    happened = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle):
        happened.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def watched_replace(old, new):
        happened.append("renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_text(tmp_path / "note.txt", "x")
    assert happened == [".note.txt.partial", "renamed", tmp_path.name]


def test_sync_keeps_no_handle_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sync(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
