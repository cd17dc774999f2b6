"""One way to end everything: the first reason wins, and every wait in the schedule hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dflash.schedule.stacks import stacks


class Stopped(Exception):
    """Raised out of a wait when the run is being ended; workers leave quietly on it."""


class Stopper:
    """Ends a run. Waits register their condition and are woken; new waits raise at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.reason: str | None = None
        self.failure = False
        self.stacks = ""  # of all threads, when a failure ended the run

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Registers something that wakes sleepers; called once, when the run is ended."""
        with self._lock:
            self._wakers.append(wake)

    def stop(self, reason: str, *, failure: bool = True) -> bool:
        """Ends the run, as failed or (a signal) as asked; False when it was being ended already."""
        with self._lock:
            if self.reason is not None:
                return False
            if failure:
                self.stacks = stacks()  # before anybody wakes up and leaves
            self.failure = failure
            self.reason = reason  # last: whoever sees a reason sees the rest
            wakers = list(self._wakers)
        for wake in wakers:
            wake()
        return True

    def check(self) -> None:
        """Raises :class:`Stopped` once the run is being ended."""
        if self.reason is not None:
            raise Stopped(self.reason)


class StoppableCondition(threading.Condition):
    """A condition whose waiters wake up, with :class:`Stopped`, when the run is ended."""

    def __init__(self, stopper: Stopper) -> None:
        super().__init__()
        self._stopper = stopper
        stopper.on_stop(self._wake)

    def _wake(self) -> None:
        with self:
            self.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits, holding the condition, until ``ready()``; raises :class:`Stopped` instead if the
        run is being ended."""
        while True:
            self._stopper.check()
            if ready():
                return
            self.wait()
