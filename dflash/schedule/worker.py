"""A worker thread that says what it does, how long, and what killed it."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator

from dflash.schedule.stop import Stopped, Stopper

WAITING = "queue"  # the one activity in which a worker may stay as long as it must


class Clock:
    """Adds up where one worker's time goes; written by its thread, read by the supervisor."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.packets = 0
        self.activity = "start"
        self.since = time.monotonic()
        self.packet: int | None = None

    @contextlib.contextmanager
    def activity_of(self, name: str) -> Iterator[None]:
        """Counts the block's time under ``name``: queue, copy, compute, compile, reduce."""
        outer, begun = self.activity, time.monotonic()
        self.seconds[outer] += begun - self.since
        self.activity, self.since = name, begun
        try:
            yield
        finally:
            now = time.monotonic()
            self.seconds[name] += now - self.since
            self.activity, self.since = outer, now

    def stuck_for(self) -> float:
        """Seconds in the present activity; 0 while it waits for others."""
        return 0.0 if self.activity in (WAITING, "reduce") else time.monotonic() - self.since

    def snapshot(self) -> dict[str, float]:
        """Seconds per activity until now."""
        seconds = dict(self.seconds)
        seconds[self.activity] = seconds.get(self.activity, 0.0) + time.monotonic() - self.since
        return seconds


class Worker(threading.Thread):
    """Runs ``body(clock)``; its first failure ends the run.

    Attributes:
        failure: the exception that killed it, or None.
        trace: that exception's traceback as text.
    """

    def __init__(self, name: str, body: Callable[[Clock], None], stopper: Stopper) -> None:
        super().__init__(name=name, daemon=True)
        self.clock = Clock()
        self.failure: BaseException | None = None
        self.trace = ""
        self._body = body
        self._stopper = stopper

    def run(self) -> None:
        try:
            self._body(self.clock)
        except Stopped:
            pass
        except BaseException as error:
            self.failure, self.trace = error, traceback.format_exc()
            lines = str(error).strip().splitlines()
            said = f"{type(error).__name__}: {lines[0] if lines else ''}"
            packet = "" if self.clock.packet is None else f" (packet {self.clock.packet})"
            self._stopper.stop(f"{self.name} died{packet}: {said}")
        finally:
            self.clock.activity, self.clock.since = WAITING, time.monotonic()


def timed(activity: str) -> contextlib.AbstractContextManager[None]:
    """Counts the block for the worker whose thread runs it; in other threads it does nothing."""
    thread = threading.current_thread()
    if isinstance(thread, Worker):
        return thread.clock.activity_of(activity)
    return contextlib.nullcontext()
