"""Notices that a thread waits inside a compile and nothing moves any more.

Progress is a new event at any hook point, or another position in the code of any thread that is
inside a compiled call, a trace or the compile lock (or waits for it). A program that computes for
hours outside compiled code is not hung, and neither is one long compile, whose position moves.

Time is counted in its own looks: a clock would run on while the program or the machine is stopped.

It is a Python thread: code that holds the interpreter's lock stops it too. It therefore touches a
file each time that it looks, and the command that started the program sees that it no longer does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.inject.recorder import Recorder


class HangWatch:
    """Calls ``on_hang(names)`` once, from its own thread.

    Args:
        recorder: knows who is inside what.
        seconds: without progress.
        beat: file whose time is renewed at each look.
    """

    def __init__(
        self,
        recorder: Recorder,
        seconds: float,
        beat: str,
        on_hang: Callable[[list[str]], None],
    ) -> None:
        self._recorder = recorder
        self._seconds = seconds
        self._beat = beat
        self._on_hang = on_hang
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="race-hang-watch", daemon=True)

    def start(self) -> None:
        """Begins to look, four times per ``seconds`` and once a second at least."""
        self._touch()  # now: the thread may never get its turn
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; the beat file goes, so that nobody waits for its next time."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._seconds)
        with contextlib.suppress(OSError):
            os.unlink(self._beat)

    def _watch(self) -> None:
        last: Any = None
        interval = min(1.0, self._seconds / 4)
        quiet = 0.0
        while not self._stop.wait(interval):
            self._touch()
            busy = self._recorder.inside_idents()
            frames = sys._current_frames()
            here = tuple(
                (ident, id(frames[ident]), frames[ident].f_lasti)
                for ident in sorted(busy)
                if ident in frames
            )
            now = (self._recorder.events, here)
            if not busy or now != last:
                last, quiet = now, 0.0
                continue
            quiet += interval
            if quiet >= self._seconds:
                self._on_hang([busy[ident] for ident in sorted(busy)])
                return

    def _touch(self) -> None:
        with contextlib.suppress(OSError), open(self._beat, "w"):
            pass
