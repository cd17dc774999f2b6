"""Scripted interleavings: which thread may pass which named point, and in which order.

A script is a short list of steps such as::

    drafter-1 trace.body step=4
    drafter-0 call.enter step=3
    drafter-0 call.settled step=3
    drafter-1 trace.end step=4

A thread that arrives at a point of the script waits there until every earlier step has been
passed. Points that the script does not name are free. Nothing waits for ever: each wait has a
deadline, and a step whose thread has ended, or waits at a later step, is known to be out of
reach at once. A script that was not passed to its end is *missed*, and a missed script is a
harness error, never a pass.

A script leaves everything else to the operating system; :mod:`harness.control` decides every
switch.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from harness.points import Event, is_point


class ScriptError(ValueError):
    """The script's text is wrong; the message names the line."""


@dataclass(frozen=True)
class Step:
    """Thread ``role`` passes ``point`` (for the ``nth`` time within its work step ``step``)."""

    role: str
    point: str
    step: int | None = None
    nth: int = 1

    def __str__(self) -> str:
        words = [self.role, self.point]
        if self.step is not None:
            words.append(f"step={self.step}")
        if self.nth != 1:
            words.append(f"nth={self.nth}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Step:
        """Reads the form that :meth:`__str__` writes."""
        # A place's regular expression may contain blanks.
        match = re.fullmatch(r"\s*(\S+)\s+(\S+@line:/.*/(?=\s|$)|\S+)((?:\s+\S+)*)\s*", text)
        if match is None:
            raise ScriptError(f"script line {text!r}: expected 'THREAD POINT [step=N] [nth=N]'")
        role, point, options = match[1], match[2], match[3].split()
        if not is_point(point):
            raise ScriptError(f"script line {text!r}: no point is called {point!r}")
        values: dict[str, int] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in ("step", "nth") or not (value.isascii() and value.isdigit()):
                raise ScriptError(f"script line {text!r}: {option!r} is not step=N or nth=N")
            if name in values:
                raise ScriptError(f"script line {text!r}: {name} is given twice")
            values[name] = int(value)
        if values.get("nth") == 0:
            raise ScriptError(f"script line {text!r}: nth counts from 1")
        return cls(role, point, values.get("step"), values.get("nth", 1))


class Script:
    """Forces one interleaving; see the module's docstring.

    Args:
        steps: in the order in which they must be passed.
        patience: seconds that one thread waits at one step before the script counts as missed.

    Raises:
        ScriptError: a line cannot be read, or stands there twice (it could be passed once only).
    """

    def __init__(self, steps: Iterable[Step | str], *, patience: float = 30.0) -> None:
        self.steps = tuple(step if isinstance(step, Step) else Step.parse(step) for step in steps)
        for index, step in enumerate(self.steps):
            if step in self.steps[:index]:
                raise ScriptError(f"script line '{step}' stands there twice: use nth=2")
        self.patience = patience
        self._changed = threading.Condition()
        self._next = 0
        self._seen: dict[tuple[str, str, int | None], int] = {}
        self._ended: set[str] = set()
        self._waits_at: dict[str, int] = {}
        self._missed: str | None = None

    def on_event(self, event: Event) -> None:
        """Called in the thread that arrives at a point; returns when it may go on."""
        with self._changed:
            index = self._index_of(event)
            if index is None:
                return
            deadline = time.monotonic() + self.patience
            self._waits_at[event.thread] = index
            self._changed.notify_all()  # somebody may wait for what this thread cannot reach now
            while self._missed is None and self._next < index:
                if (why := self._out_of_reach()) is not None:
                    self._miss(why)
                    break
                blocker = self.steps[self._next]
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._miss(f"'{self.steps[index]}' waited {self.patience:g} s for '{blocker}'")
                    break
                self._changed.wait(remaining)
            del self._waits_at[event.thread]
            if self._missed is None:
                self._next = index + 1
                self._changed.notify_all()

    def begin(self, roles: Iterable[str]) -> None:
        """Part of what a crew tells its conductor; a script has nothing to do with it."""

    def thread_started(self, role: str) -> None:
        """The same: a script holds nobody back before its first point."""

    def thread_ended(self, role: str) -> None:
        """Says that ``role`` will pass no more points; waiting threads learn it at once."""
        with self._changed:
            self._ended.add(role)
            self._changed.notify_all()

    def missed(self) -> str | None:
        """Why the script was not passed to its end, or None when it was."""
        with self._changed:
            if self._missed is None and self._next < len(self.steps):
                return f"'{self.steps[self._next]}' was never reached"
            return self._missed

    def passed(self) -> list[str]:
        """The steps passed so far, in order."""
        with self._changed:
            return [str(step) for step in self.steps[: self._next]]

    def _out_of_reach(self) -> str | None:
        """Why nobody can pass the next step any more, if so."""
        blocker = self.steps[self._next]
        if blocker.role in self._ended:
            return f"'{blocker}' is out of reach: {blocker.role} has ended"
        at = self._waits_at.get(blocker.role, self._next)
        if at > self._next:
            return f"'{blocker}' is out of reach: {blocker.role} waits at '{self.steps[at]}'"
        return None

    def _miss(self, why: str) -> None:
        self._missed = why
        self._changed.notify_all()

    def _index_of(self, event: Event) -> int | None:
        """The step that this arrival fulfils, if any; each arrival is counted once."""
        in_step = self._count(event, event.step)
        in_run = in_step if event.step is None else self._count(event, None)
        for index in range(self._next, len(self.steps)):
            step = self.steps[index]
            if step.role != event.thread or step.point != event.point:
                continue
            if step.step is None:
                if step.nth == in_run:
                    return index
            elif step.step == event.step and step.nth == in_step:
                return index
        return None

    def _count(self, event: Event, step: int | None) -> int:
        key = (event.thread, event.point, step)
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key]
