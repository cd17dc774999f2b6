"""Watches the workers: a dead one ends the run at once, a stuck one after its limit.

A thread cannot be stopped from outside while it is inside a compile or a device wait. So the order
is: everybody is told, the crash report is written, those who can be joined in time are joined, and
if one is left the process has to be ended by whoever owns it (:attr:`RunFailed.must_exit`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash.schedule.crash import write_crash_report
from dflash.schedule.stop import Stopper
from dflash.schedule.worker import Worker

_LOOK_EVERY = 0.1  # seconds


class RunFailed(RuntimeError):
    """The run was ended by a failure.

    Attributes:
        report: folder of the crash report, or why there is none (a full disk).
        must_exit: a worker could not be joined; only ``os._exit`` ends it.
    """

    def __init__(self, reason: str, report: Path | str, must_exit: bool) -> None:
        super().__init__(f"{reason}; crash report: {report}")
        self.reason = reason
        self.report = report
        self.must_exit = must_exit


def supervise(
    workers: Sequence[Worker],
    stopper: Stopper,
    *,
    stall_seconds: float,
    join_seconds: float,
    folder: Path,
    facts: Callable[[], Mapping[str, Any]],
    on_tick: Callable[[], None] = lambda: None,
    moved: Callable[[], float] = lambda: 0.0,
) -> None:
    """Starts the workers and returns when all have ended well.

    Args:
        on_tick: called about ten times a second from this thread (progress, signals).
        moved: when (monotonic) the work that all wait for, such as an evaluation, last moved.

    Raises:
        RunFailed: a worker raised, got stuck, or could not be joined.
    """
    ended = threading.Event()
    stopper.on_stop(ended.set)
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            ended.wait(_LOOK_EVERY)
            if stopper.reason is not None:
                break
            for worker in workers:
                if worker.is_alive() and worker.clock.stuck_for() > stall_seconds:
                    stopper.stop(
                        f"{worker.name} has been in {worker.clock.activity!r} for more than "
                        f"{stall_seconds:g} s (packet {worker.clock.packet})"
                    )
            if time.monotonic() - max(moved(), *(w.clock.since for w in workers)) > stall_seconds:
                stopper.stop(f"no worker has moved for more than {stall_seconds:g} s")
            on_tick()
    except BaseException as error:
        # Ctrl-C twice, or a broken display: nobody is left behind.
        stopper.stop(f"the supervisor ended: {type(error).__name__}: {error}")
        _join(workers, join_seconds)
        raise
    if stopper.reason is not None and not stopper.failure:
        if not _join(workers, join_seconds):
            return
        stopper.failure, stopper.reason = True, "a worker did not end when it was asked to"
    if stopper.reason is not None:
        report: Path | str
        try:
            report = write_crash_report(folder, stopper, workers, facts())
        except OSError as error:  # a full disk may be what ended the run
            report = f"none, {folder / 'crash'} cannot be written ({error.strerror})"
        left = _join(workers, join_seconds)
        raise RunFailed(stopper.reason, report, must_exit=bool(left))


def _join(workers: Sequence[Worker], seconds: float) -> list[Worker]:
    deadline = time.monotonic() + seconds
    for worker in workers:
        if worker.ident is None:
            continue  # never started
        worker.join(max(0.0, deadline - time.monotonic()))
    return [worker for worker in workers if worker.is_alive()]
