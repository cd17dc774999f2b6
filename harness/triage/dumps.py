"""Dumps of all threads' stacks: faulthandler's, py-spy's and pystack's.

Covered: `faulthandler.dump_traceback` and its watchdog, "Fatal Python error", `py-spy dump`
(``func (file.py:12)`` frames), pystack's "Traceback for thread". Frames come out outermost first,
whatever the tool's order.

Not covered: native frames of py-spy and pystack (they are passed over), gdb's `bt`.
"""

from __future__ import annotations

import re

from harness.triage.events import FRAMES_KEPT, Event, Frame, Kind, Stack, shorten
from harness.triage.lines import Line

_FATAL = re.compile(r"Fatal Python error: (.{1,200})")
_TIMEOUT = re.compile(r"^Timeout \((\d+:\d\d:\d\d(?:\.\d+)?)\)!$")
_THREAD = re.compile(
    r"^(Current thread|Thread) (0x[0-9a-fA-F]+|\d+)(?: \[([^\]]{1,100})\])? \(most recent call "
    r"(?:first|last)\):"
)
_FAULT_FRAME = re.compile(r'^\s*File "([^"]{1,600})", line (\d{1,8}) in (\S.{0,200})$')
_SPY_PROCESS = re.compile(r"^Process (\d+): (.{1,400})$")
_SPY_THREAD = re.compile(
    r"^Thread (0x[0-9a-fA-F]+|\d+)(?:/0x[0-9a-fA-F]+)? \(((?:idle|active)[^)]*)\)"
    r"(?:: \"([^\"]{1,200})\")?"
)
_SPY_FRAME = re.compile(r"^\s+(\S.{0,200}?) \(([^()\n]{1,400}?):(\d{1,8})\)$")
_STACK_THREAD = re.compile(r"^Traceback for thread (\d+)(?: \(([^)]{1,100})\))?[^(]*\(most recent")
_STACK_FRAME = re.compile(r'^\s*\((?:Python|C)\) File "([^"]{1,600})", line (\d{1,8}), in (\S.*)$')


class Dumps:
    """The dumps of one stream of lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._event: Event | None = None
        self._stacks: list[Stack] = []
        self._thread: tuple[str, str] | None = None
        self._frames: list[Frame] = []
        self._outermost_first = False
        self._misses = 0

    @property
    def busy(self) -> bool:
        """Whether a dump is being read."""
        return self._event is not None

    def feed(self, line: Line) -> tuple[bool, list[Event]]:
        """Whether the line was part of a dump, and the dump that it ended."""
        text = line.text
        fatal = _FATAL.search(text) if "Fatal" in text else None
        if fatal:
            out = self.finish()
            self._begin(line, Kind.FATAL, fatal[1].strip())
            return True, out
        timeout = _TIMEOUT.match(text) if text.startswith("Timeout") else None
        if timeout:
            out = self.finish()
            self._begin(line, Kind.STACKS, f"faulthandler: timeout {timeout[1]}")
            return True, out
        if text.startswith(("Thread ", "Current thread ", "Traceback for thread ", "Process ")):
            return self._head(line, text)
        if self._event is None or self._thread is None:
            return self._event is not None and not text.strip(), []
        return self._body(text)

    def _head(self, line: Line, text: str) -> tuple[bool, list[Event]]:
        found = _THREAD.match(text)
        if found:
            if self._event is None:
                self._begin(line, Kind.STACKS, "faulthandler")
            state = "current" if found[1].startswith("Current") else ""
            self._next(found[3] or found[2], state)
            return True, []
        found = _SPY_THREAD.match(text)
        if found:
            if self._event is None:
                self._begin(line, Kind.STACKS, "py-spy")
            self._next(found[3] or found[1], found[2])
            return True, []
        found = _STACK_THREAD.match(text)
        if found:
            if self._event is None:
                self._begin(line, Kind.STACKS, "pystack")
            self._next(found[2] or found[1], "")
            self._outermost_first = True
            return True, []
        found = _SPY_PROCESS.match(text)
        if found:
            out = self.finish()
            self._begin(line, Kind.STACKS, "py-spy")
            assert self._event is not None
            self._event.details["pid"] = int(found[1])
            return True, out
        return False, []

    def _body(self, text: str) -> tuple[bool, list[Event]]:
        found = _FAULT_FRAME.match(text) or _STACK_FRAME.match(text)
        if found:
            self._add(Frame(shorten(found[1]), int(found[2]), found[3].strip()))
            return True, []
        found = _SPY_FRAME.match(text)
        if found:
            self._add(Frame(shorten(found[2]), int(found[3]), found[1]))
            return True, []
        if text.startswith("  ") or not text.strip() or text.startswith("Python v"):
            self._misses = 0 if text.strip() else self._misses + 1
            return True, []
        self._misses += 1
        if text.startswith("Extension modules:") or self._misses > 3:
            return text.startswith("Extension modules:"), self.finish()
        return False, []

    def _begin(self, line: Line, kind: Kind, what: str) -> None:
        self._event = Event(
            kind,
            line.place(self.name),
            type=what,
            rank=line.rank,
            time=line.time,
            whole=True,
        )
        self._stacks, self._thread, self._frames, self._misses = [], None, [], 0
        self._outermost_first = False

    def _next(self, thread: str, state: str) -> None:
        self._end_thread()
        self._thread, self._misses = (thread, state), 0

    def _add(self, frame: Frame) -> None:
        if len(self._frames) < FRAMES_KEPT:
            self._frames.append(frame)
        self._misses = 0

    def _end_thread(self) -> None:
        if self._thread is not None:
            frames = self._frames if self._outermost_first else self._frames[::-1]
            self._stacks.append(Stack(self._thread[0], tuple(frames), self._thread[1]))
        self._thread, self._frames = None, []

    def finish(self) -> list[Event]:
        """The dump that was being read, if any."""
        if self._event is None:
            return []
        self._end_thread()
        event, self._event = self._event, None
        event.stacks = tuple(self._stacks)
        current = next((s for s in event.stacks if s.state == "current"), None)
        if event.kind is Kind.FATAL and current is not None:
            event.frames, event.thread = current.frames, current.thread
        return [event]
