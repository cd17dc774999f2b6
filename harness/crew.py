"""Runs N named threads over one function and keeps one outcome per thread.

Start patterns:

* ``staggered`` (default): member i starts when member i-1 has finished work step ``after_step``.
  That is an event, not a delay. A warm thread that keeps stepping beside one that compiles is
  what shows compile races.
* ``together``: all members are released at once.

Nothing waits for ever: one deadline covers the whole run; a member that ends early, well or
badly, releases whoever waited for it; a member that has not ended at the deadline is reported as
``unfinished`` with its stack. A Python thread cannot be stopped from outside: members are daemon
threads, and a process with an unfinished member should end by ``os._exit`` (an isolated case
does).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.capture import CapturedError, Frame, capture_error, stack_of

if TYPE_CHECKING:
    from harness.control import Control
    from harness.hooks import Hooks
    from harness.schedule import Script

STARTS = ("staggered", "together")
COMPLETED, RAISED, UNFINISHED = "completed", "raised", "unfinished"


class CrewError(ValueError):
    """The crew was asked for something that cannot be; one line says what."""


@dataclass
class Outcome:
    """What became of one thread.

    Attributes:
        thread: its name.
        state: ``completed``, ``raised`` or ``unfinished``.
        steps: work steps that it finished.
        seconds: from its start to its end (or to the deadline).
        result: what its function returned.
        error: the exception, as data.
        stack: where an unfinished thread was at the deadline, outermost frame first.
    """

    thread: str
    state: str = UNFINISHED
    steps: int = 0
    seconds: float = 0.0
    result: Any = field(default=None, repr=False)
    error: CapturedError | None = None
    stack: tuple[Frame, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report; the result stays behind, it may be anything."""
        data = asdict(replace(self, result=None))  # asdict copies deeply, and tensors refuse
        del data["result"]
        return data


class Member:
    """What the crew's function is given: who it is, and how it says that it makes progress."""

    def __init__(self, crew: Crew, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.steps_done = 0
        self._crew = crew
        self._step_done: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._ended = False

    def step(self, number: int) -> _WorkStep:
        """``with member.step(3): ...``: work step ``number`` (from 0) begins and ends here."""
        return _WorkStep(self, number)

    @property
    def stopping(self) -> bool:
        """True once the crew's deadline has passed; a long loop may look at it and leave."""
        return self._crew.stopping

    def _event(self, number: int) -> threading.Event:
        with self._lock:
            event = self._step_done.setdefault(number, threading.Event())
            if self._ended or number < self.steps_done:
                event.set()
            return event

    def _finish(self, number: int) -> None:
        with self._lock:
            self.steps_done = max(self.steps_done, number + 1)
            for step, event in self._step_done.items():
                if step < self.steps_done:
                    event.set()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            for event in self._step_done.values():
                event.set()


class _WorkStep:
    def __init__(self, member: Member, number: int) -> None:
        self._member = member
        self._number = number

    def __enter__(self) -> int:
        hooks = self._member._crew.hooks
        if hooks is not None:
            hooks.work_step(self._number)
            hooks.emit("step.begin")
        return self._number

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        hooks = self._member._crew.hooks
        if kind is None:
            self._member._finish(self._number)
            if hooks is not None:
                hooks.emit("step.end")
        if hooks is not None:
            hooks.work_step(None)


class Crew:
    """``size`` threads called ``NAME-0 .. NAME-(size-1)``; see the module's docstring.

    Args:
        size: number of threads, at least 1.
        start: ``staggered`` or ``together``.
        after_step: with ``staggered``, the step of the member before that releases the next one.
        deadline: seconds for the whole run.
        name: common part of the threads' names.
        hooks: where work steps are announced (:class:`harness.hooks.Hooks`), or None.
        script: who conducts the members (:class:`harness.schedule.Script` or
            :class:`harness.control.Control`): it is told who they are, and when each begins and
            has ended. Or None. A control decides itself who begins, so all start ``together``.

    Raises:
        CrewError: for a size below 1, an unknown start pattern, a negative step, a deadline
            that is not a positive number of seconds, or a control with ``staggered``.
    """

    def __init__(
        self,
        size: int,
        *,
        start: str = "staggered",
        after_step: int = 1,
        deadline: float = 120.0,
        name: str = "drafter",
        hooks: Hooks | None = None,
        script: Script | Control | None = None,
    ) -> None:
        if size < 1:
            raise CrewError(f"a crew needs at least 1 thread, not {size}")
        if start not in STARTS:
            raise CrewError(f"unknown start pattern {start!r}: use {' or '.join(STARTS)}")
        if after_step < 0:
            raise CrewError(f"work steps count from 0: after_step cannot be {after_step}")
        if not 0 < deadline <= threading.TIMEOUT_MAX:
            raise CrewError(f"a crew's deadline must be positive and finite, not {deadline}")
        if start == "staggered" and size > 1 and hasattr(script, "strategy"):
            raise CrewError("a control decides who begins: give the crew start='together'")
        self.start = start
        self.after_step = after_step
        self.deadline = deadline
        self.hooks = hooks
        self.script = script
        self.stopping = False
        self._used = False
        self.members = [Member(self, index, f"{name}-{index}") for index in range(size)]
        self._extra: list[tuple[Member, Callable[[Member], Any]]] = []

    def add(self, name: str, function: Callable[[Member], Any]) -> Member:
        """Adds one more thread with its own function; it starts at once, whatever the pattern.

        Raises:
            CrewError: when another thread of the crew has that name already.
        """
        if any(name == member.name for member in self._everybody()):
            raise CrewError(f"a thread of this crew is called {name!r} already")
        member = Member(self, -1, name)
        self._extra.append((member, function))
        return member

    def run(self, function: Callable[[Member], Any]) -> list[Outcome]:
        """Runs ``function(member)`` in every thread; returns the outcomes in the members' order.

        Returns when all have ended or the deadline has passed, whichever comes first. Never
        raises what a member raised. After the deadline nobody starts any more: a member whose
        turn had not come is ``unfinished`` and stays so.

        Raises:
            CrewError: on a second call; make a new crew for it.
        """
        if self._used:
            raise CrewError("a crew runs once: make a new one")
        self._used = True
        begun = time.monotonic()
        released = threading.Event()
        work = [(member, function) for member in self.members] + self._extra
        outcomes = {member.name: Outcome(member.name) for member, _ in work}
        threads: dict[str, threading.Thread] = {}

        def body(member: Member, function: Callable[[Member], Any]) -> None:
            outcome = outcomes[member.name]
            may_start = self._await_start(member, released)
            started = time.monotonic()
            try:
                if not may_start:
                    return
                if self.script is not None:
                    self.script.thread_started(member.name)
                outcome.result = function(member)
                outcome.state = COMPLETED
            except BaseException as error:
                outcome.error = capture_error(error)
                outcome.state = RAISED
            finally:
                outcome.seconds = time.monotonic() - started
                outcome.steps = member.steps_done
                member._end()
                if self.script is not None:
                    self.script.thread_ended(member.name)

        if self.script is not None:
            self.script.begin(member.name for member, _ in work)
        for member, own in work:
            threads[member.name] = threading.Thread(
                target=body, args=(member, own), name=member.name, daemon=True
            )
        try:
            for thread in threads.values():
                thread.start()
            released.set()
            for thread in threads.values():
                thread.join(max(0.0, begun + self.deadline - time.monotonic()))
            self.stopping = True
            self._look_at_the_late(threads, outcomes, begun)
        finally:  # who has not started is woken and leaves, also after Ctrl-C
            self.stopping = True
            released.set()
            for member in self.members:
                member._end()
        return list(outcomes.values())

    def _everybody(self) -> list[Member]:
        return [*self.members, *(member for member, _ in self._extra)]

    def _look_at_the_late(
        self,
        threads: dict[str, threading.Thread],
        outcomes: dict[str, Outcome],
        begun: float,
    ) -> None:
        steps = {member.name: member.steps_done for member in self._everybody()}
        frames = sys._current_frames()
        for name, thread in threads.items():
            if thread.is_alive():
                outcome = outcomes[name] = Outcome(name)  # the thread may still write to the old
                outcome.steps = steps[name]
                outcome.seconds = time.monotonic() - begun
                frame = frames.get(thread.ident or -1)
                outcome.stack = stack_of(frame) if frame is not None else ()

    def _await_start(self, member: Member, released: threading.Event) -> bool:
        # Both waits end: `released` is set by run(), and so is the event of a member that ends.
        released.wait()
        if self.start == "staggered" and member.index > 0:
            self.members[member.index - 1]._event(self.after_step).wait()
        return not self.stopping
