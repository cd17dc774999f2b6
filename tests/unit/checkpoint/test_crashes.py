"""Dying while a checkpoint is written, and a disk that is full: the last good one stays."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash import disk
from dflash.checkpoint import CheckpointError, CheckpointStore

PROGRAM = Path(__file__).with_name("crash_points.py")


def crash(folder, mode, count):
    """The JSON lines of the program in crash_points.py."""
    command = [sys.executable, str(PROGRAM), str(folder), mode, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_kill_at_every_disk_step_leaves_a_checkpoint_that_loads(tmp_path):
    lines = crash(tmp_path / "run", "enumerated", 1000)
    *killed, last = lines
    assert all(line["killed"] for line in killed) and not last["killed"]
    assert len(killed) >= 100  # four saves, marks and rotation, before / halfway / after each step
    for line in lines:
        assert line["equal"] and line["step"] >= line["least"], line
        assert line["said"] == [], line  # a crash never leaves what looks like a checkpoint
        assert line["next"] and line["left"] == [], line
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert last["step"] == 5


def test_kill_9_at_fifty_moments_leaves_a_checkpoint_that_loads(tmp_path):
    lines = crash(tmp_path / "run", "timed", 50)
    assert len(lines) == 50
    for line in lines:
        assert line["equal"] and line["step"] >= line["least"] and line["said"] == [], line


@pytest.mark.parametrize("step", ["write_tensors", "write_bytes", "sync", "make_folder", "rename"])
def test_a_full_disk_is_one_line_and_leaves_the_last_good_one(tmp_path, monkeypatch, step):
    store = CheckpointStore(tmp_path, keep=1)
    good = store.save(1, {"w": torch.ones(3)}, {"n": 1})

    def full(path, *_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(disk, step, full)
    with pytest.raises(CheckpointError) as caught:
        store.save(2, {"w": torch.zeros(3)}, {"n": 2})
    monkeypatch.undo()
    said = str(caught.value)
    assert "\n" not in said
    assert "step 2" in said and "No space left on device" in said and str(good) in said
    assert store.latest_good() == good and [p.name for p in tmp_path.iterdir()] == [good.name]
    assert torch.equal(store.load(good)[0]["w"], torch.ones(3))


def test_a_file_that_may_not_grow_is_reported_by_the_system_itself(tmp_path):
    """The real refusal, through safetensors, not a raised one: RLIMIT_FSIZE in a child."""
    store = CheckpointStore(tmp_path, keep=1)
    good = store.save(1, {"w": torch.ones(3)}, {"n": 1})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            store.save(2, {"w": torch.ones(1_000_000)}, {"n": 2})
        except CheckpointError as error:
            code = 0 if "File too large" in str(error) and "\n" not in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.latest_good() == good and [p.name for p in tmp_path.iterdir()] == [good.name]


def test_a_failed_removal_of_an_old_one_is_said_and_does_not_fail_the_save(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, {})

    def refuse(old, new, plain=disk.rename):
        if old.name == "step-000001":
            raise OSError(13, "Permission denied")
        plain(old, new)

    monkeypatch.setattr(disk, "rename", refuse)
    with pytest.warns(UserWarning, match="old checkpoints are not removed"):
        newest = store.save(2, {}, {})
    assert store.latest_good() == newest
