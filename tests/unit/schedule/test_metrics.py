"""What a run writes down survives being killed, and a full disk does not hide the failure."""

from __future__ import annotations

import errno
import os

import pytest

from dflash.schedule.metrics import MetricsLog, read_metrics


def test_a_torn_last_line_costs_only_itself(tmp_path):
    """Killed in the middle of a line, resumed: the resumed run's first line is read."""
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write("train", 1, loss=2.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write("train", 2, loss=1.5)
        log.write("train", 3, loss=1.0)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_end_does_not_replace_the_failure(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, tensorboard=False)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match="why the run failed"), log:
        raise RuntimeError("why the run failed")


def test_a_full_disk_at_the_end_of_a_good_run_is_told(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, tensorboard=False)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), log:
        pass
