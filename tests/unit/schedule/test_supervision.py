"""A dead worker ends the run at once, a stuck one after its limit, and the report says who."""

from __future__ import annotations

import errno
import json
import os
import threading
import time

import pytest

from dflash.schedule import Stopper, Worker
from dflash.schedule.supervise import RunFailed, supervise
from dflash.schedule.worker import timed


def run(bodies, tmp_path, *, stall=60.0, join=2.0, stopper=None):
    stopper = stopper or Stopper()
    workers = [Worker(name, body(stopper), stopper) for name, body in bodies.items()]
    supervise(
        workers,
        stopper,
        stall_seconds=stall,
        join_seconds=join,
        folder=tmp_path,
        facts=lambda: {"step": 7},
    )
    return workers


def waits_for_stop(stopper):
    """A worker that leaves when the run is ended."""
    woken = threading.Event()
    stopper.on_stop(woken.set)

    def body(clock):
        with clock.activity_of("queue"):
            woken.wait(60)
        stopper.check()

    return body


def raises(stopper):
    def body(clock):
        clock.packet = 11
        raise ValueError("no such thing")

    return body


def never_ends(stopper):
    """Stands for a thread inside a compile or a device wait: it hears nothing."""

    def body(clock):
        with clock.activity_of("compile"):
            threading.Event().wait(600)

    return body


def ends(stopper):
    return lambda clock: None


def test_workers_that_end_end_the_run(tmp_path):
    run({"target-0": ends, "drafter-0": ends}, tmp_path)
    assert not (tmp_path / "crash").exists()


def test_a_dead_worker_ends_the_run_and_is_named(tmp_path):
    with pytest.raises(RunFailed) as caught:
        run({"target-0": waits_for_stop, "drafter-1": raises}, tmp_path)
    assert "drafter-1 died (packet 11): ValueError: no such thing" in str(caught.value)
    assert caught.value.must_exit is False, "the other worker was not woken"
    report = json.loads((tmp_path / "crash" / "report.json").read_text())
    assert report["step"] == 7
    by_name = {worker["worker"]: worker for worker in report["workers"]}
    assert "no such thing" in by_name["drafter-1"]["traceback"]
    assert by_name["drafter-1"]["packet"] == 11
    assert "thread target-0" in (tmp_path / "crash" / "stacks.txt").read_text()


def test_who_cannot_be_joined_is_said(tmp_path):
    """Another worker inside a compile: the report is on disk before anybody is given up."""
    with pytest.raises(RunFailed) as caught:
        run({"drafter-0": never_ends, "drafter-1": raises}, tmp_path, join=0.2)
    assert caught.value.must_exit is True
    assert (tmp_path / "crash" / "report.json").exists()


def test_a_stuck_worker_ends_the_run(tmp_path):
    with pytest.raises(RunFailed, match=r"drafter-0 has been in 'compile' for more than 0.3 s"):
        run({"drafter-0": never_ends}, tmp_path, stall=0.3, join=0.1)


def test_everybody_waiting_for_everybody_ends_the_run(tmp_path):
    with pytest.raises(RunFailed, match="no worker has moved"):
        run({"target-0": waits_for_stop, "drafter-0": waits_for_stop}, tmp_path, stall=0.3)


def test_a_run_that_is_asked_to_end_has_not_failed(tmp_path):
    stopper = Stopper()

    def asks(stopper):
        return lambda clock: stopper.stop("signal 15", failure=False)

    run({"target-0": waits_for_stop, "drafter-0": asks}, tmp_path, stopper=stopper)
    assert not (tmp_path / "crash").exists()


def test_the_crash_report_tells_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret-value")
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    with pytest.raises(RunFailed):
        run({"drafter-0": raises}, tmp_path)
    text = (tmp_path / "crash" / "report.json").read_text()
    assert "secret-value" not in text and "recompiles" in text


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    """The crash report cannot be written either: the reason is told all the same."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dflash.schedule.supervise.write_crash_report", full)
    with pytest.raises(RunFailed) as caught:
        run({"target-0": waits_for_stop, "drafter-1": raises}, tmp_path)
    said = str(caught.value)
    assert said.startswith("drafter-1 died (packet 11): ValueError: no such thing; crash report: ")
    assert "No space left on device" in said and "\n" not in said
    assert caught.value.must_exit is False


def test_a_worker_that_cannot_be_started_leaves_nobody_behind(tmp_path, monkeypatch):
    """The system gives no more threads: those that run are ended."""
    stopper = Stopper()
    runs = Worker("target-0", waits_for_stop(stopper), stopper)
    refused = Worker("drafter-0", ends(stopper), stopper)

    def no_thread():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(refused, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        supervise(
            [runs, refused], stopper, stall_seconds=60, join_seconds=30, folder=tmp_path,
            facts=dict,
        )  # fmt: skip
    assert not runs.is_alive()


def test_a_long_evaluation_is_not_a_stall(tmp_path):
    """All workers wait for one that evaluates, longer than the limit: it moves, row by row."""
    stopper, over, ticks = Stopper(), threading.Event(), []

    def waits(clock):
        with clock.activity_of("reduce"):
            assert over.wait(60)

    def tick():
        ticks.append(time.monotonic())
        if ticks[-1] - ticks[0] > 0.6:  # three times the limit
            over.set()

    supervise(
        [Worker("drafter-0", waits, stopper)], stopper, stall_seconds=0.2, join_seconds=2.0,
        folder=tmp_path, facts=dict, on_tick=tick, moved=time.monotonic,
    )  # fmt: skip
    assert over.is_set() and stopper.reason is None


def test_time_is_counted_for_the_worker_whose_thread_it_is(tmp_path):
    """Code far below the worker's body says what it does; in other threads nothing is counted."""

    def copies(stopper):
        def body(clock):
            with clock.activity_of("compute"):
                with timed("copy"):
                    assert clock.activity == "copy"
                assert clock.activity == "compute"

        return body

    with timed("copy"):
        (worker,) = run({"target-0": copies}, tmp_path)
    assert worker.failure is None
    assert {"copy", "compute"} <= worker.clock.seconds.keys()
