"""Cooperative control: of a crew's threads one runs at a time, and a strategy says which.

A thread that arrives at a point stands there until it is its turn. So the order in which points
are passed is the strategy's choice and nothing else's, and a run can be repeated.

Locks: a thread that asks for a lock that another one holds (``lock.wait`` on dynamo's
``compile_lock``) cannot run until it is given back, so nobody is held while he has what the one
who runs must take; it stands there also when ``lock.wait`` is none of the points. A thread that
waits in anything else (another lock, an event, a subprocess) is recognised by a watcher: it
sleeps, uses no processor time and its frame does not move; another thread runs then, and
``blocked`` stands in the schedule. When such a thread goes on by itself, it runs
beside the other until its next point: the order of the two is not controlled.

Threads outside the crew (the autograd engine's on a GPU, say) run freely. Nothing waits for
ever: a thread that has been held for ``patience`` seconds without anybody arriving anywhere sets
all free, and the run is *missed*: a harness error, never a pass. One that stands before a lock is
held by nobody but the lock's owner: after ``patience`` it waits in the lock itself, as ``blocked``,
and where that is a deadlock, the crew's deadline says so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from harness.places import is_place
from harness.points import Event, to_install
from harness.replay import BLOCKED, END, Line, Passed, Schedule, parting
from harness.strategies import Choice, Follow, Preemptions, Priorities, Strategy

# Where a switch makes a difference; what the standard points say twice is left out.
SWITCH_POINTS = (
    "step.begin",
    "call.arrive",
    "call.exit",
    "trace.*",
    "annotate.tested",
    "annotate.body",
    "annotate.left",
    "flex.eager",
    "lock.wait",
    "patch.*",
)
_LOOK_EVERY = 0.02  # seconds between two looks of the watcher
_BLOCKED_AFTER = 6  # looks without any progress
_BUSY = 0.1  # share of a processor that a thread uses that is not blocked

FREE, SCRIPTED = "free", "scripted"  # how a run without control came about
READY, RUNNING, WAITS_FOR_LOCK, WAITS, ENDED = "ready", "running", "lock", "waits", "ended"


@dataclass(frozen=True)
class Decision:
    """One choice of who runs.

    Attributes:
        options: the threads that could, in the crew's order.
        current: the one that had just arrived, if it could go on.
        at: the point at which it stood.
        chosen: who ran.
    """

    options: tuple[str, ...]
    current: str | None
    at: str | None
    chosen: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "options": list(self.options)}


class Control:
    """A listener for :class:`harness.hooks.Hooks` and the conductor of a crew.

    Args:
        strategy: who runs next.
        points: where threads stand and may be switched: names, patterns (``patch.*``) or places.
        patience: seconds without any arrival after which the run is missed.
        recorded: the trace that the run should repeat.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        points: Sequence[str] = SWITCH_POINTS,
        patience: float = 30.0,
        recorded: Sequence[Passed] = (),
    ) -> None:
        self.strategy = strategy
        self.points = tuple(points)
        self.patience = patience
        self.decisions: list[Decision] = []
        self.blocked: list[str] = []
        self._recorded = tuple(recorded)
        self._changed = threading.Condition()
        self._trace: list[Passed] = []
        self._counts: Counter[Passed] = Counter()
        self._roles: tuple[str, ...] = ()
        self._states: dict[str, str] = {}
        self._standing: dict[str, tuple[str, int]] = {}
        self._wanted: dict[str, str] = {}  # thread -> the lock that it asks for
        self._owners: dict[str, str] = {}  # lock -> thread
        # thread -> ident, the kernel's id, its processor clock
        self._clocks: dict[str, tuple[int, int, int]] = {}
        self._matches: dict[str, bool] = {}
        self._current: str | None = None
        self._arrivals = 0
        self._last_arrival = 0.0
        self._free = False
        self._missed: str | None = None
        self._stop = threading.Event()

    # -- told by the crew ------------------------------------------------------------------------

    def begin(self, roles: Iterable[str]) -> None:
        """Names the crew; called before any of its threads starts."""
        self._roles = tuple(roles)
        self._states = dict.fromkeys(self._roles, "new")
        self._last_arrival = time.monotonic()
        threading.Thread(target=self._look_on, name="race-watcher", daemon=True).start()

    def thread_started(self, role: str) -> None:
        """Called in a thread of the crew before its work; returns when it is its turn.

        The first choice is made when all are there.
        """
        ident = threading.get_ident()
        with self._changed:
            clock = time.pthread_getcpuclockid(ident)
            self._clocks[role] = (ident, threading.get_native_id(), clock)
            self._states[role] = READY
            if all(state == READY for state in self._states.values()):
                self._choose(None)
            self._await_turn(role)

    def thread_ended(self, role: str) -> None:
        """Called in a thread of the crew after its work."""
        with self._changed:
            if role not in self._states:
                return
            self._states[role] = ENDED
            self._standing.pop(role, None)
            self._arrived()
            if self._current in (role, None):
                self._trace.append((role, END))
                self._choose(None)
            if all(state == ENDED for state in self._states.values()):
                self._stop.set()

    # -- events ----------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Called in the thread that arrives at a point; returns when it may go on."""
        with self._changed:
            freed = self._follow_locks(event)
            if self._free:
                return
            if event.thread not in self._states:
                if freed and self._current is None:
                    self._choose(None)
                return
            if self._stops_at(event.point) or self._must_wait(event):
                self._arrive(event)

    def _arrive(self, event: Event) -> None:
        thread, point = event.thread, event.point
        self._arrived()
        self._counts[thread, point] += 1
        self._standing[thread] = (point, self._counts[thread, point])
        self._states[thread] = WAITS_FOR_LOCK if self._must_wait(event) else READY
        self._wanted.pop(thread, None)
        if point == "lock.wait" and self._owners.get(event.what) != thread:
            self._wanted[thread] = event.what
        if self._current == thread:
            self._trace.append((thread, point))
            self._choose(thread if self._states[thread] == READY else None)
            self._await_turn(thread)
        else:  # it was blocked, and has come back while another one runs
            if self._current is None:
                self._choose(None)
            self._await_turn(thread)
            self._trace.append((thread, point))

    def _follow_locks(self, event: Event) -> bool:
        """Keeps the owners; returns whether somebody can run now who could not before."""
        lock = event.what
        if event.point == "lock.held":
            self._owners[lock] = event.thread
            self._wanted.pop(event.thread, None)
            self._move_those_who_want(lock, READY, WAITS_FOR_LOCK)  # they stand before it
        elif event.point == "lock.released":
            self._owners.pop(lock, None)
            return self._move_those_who_want(lock, WAITS_FOR_LOCK, READY)
        return False

    def _move_those_who_want(self, lock: str, old: str, new: str) -> bool:
        moved = [
            role
            for role, wanted in self._wanted.items()
            if wanted == lock and self._states[role] == old
        ]
        self._states |= dict.fromkeys(moved, new)
        return bool(moved)

    def _must_wait(self, event: Event) -> bool:
        return event.point == "lock.wait" and (
            self._owners.get(event.what, event.thread) != event.thread
        )

    def _stops_at(self, point: str) -> bool:
        if point not in self._matches:
            self._matches[point] = point in self.points or any(
                fnmatchcase(point, pattern) for pattern in self.points if not is_place(pattern)
            )
        return self._matches[point]

    # -- turns -----------------------------------------------------------------------------------

    def _choose(self, arrived: str | None) -> None:
        options = tuple(role for role in self._roles if self._states[role] == READY)
        if not options:
            self._current = None  # all wait or have ended: whoever comes back goes on
            self._changed.notify_all()
            return
        ended = frozenset(role for role, state in self._states.items() if state == ENDED)
        choice = Choice(
            len(self.decisions), arrived, options, dict(self._standing), dict(self._counts), ended
        )
        chosen = self.strategy.choose(choice)
        at = None if arrived is None else self._standing[arrived][0]
        self.decisions.append(Decision(options, arrived, at, chosen))
        self._current = chosen
        self._changed.notify_all()

    def _await_turn(self, thread: str) -> None:
        while not self._free and self._current != thread:
            remaining = self._last_arrival + self.patience - time.monotonic()
            if remaining <= 0:
                if self._states[thread] == WAITS_FOR_LOCK:
                    self._blocks(thread)
                    return
                self._give_up(thread)
                break
            self._changed.wait(remaining)
        self._states[thread] = RUNNING
        self._standing.pop(thread, None)

    def _blocks(self, thread: str) -> None:
        self._states[thread] = WAITS
        self._standing.pop(thread, None)
        self.blocked.append(thread)
        self._trace.append((thread, BLOCKED))

    def _give_up(self, thread: str) -> None:
        at, _ = self._standing.get(thread, ("its start", 1))
        who = f"{self._current} did not arrive anywhere" if self._current else "nobody could run"
        self._missed = f"{thread} stood at {at} for {self.patience:g} s: {who}"
        self._free = True
        self._stop.set()
        self._changed.notify_all()

    def _arrived(self) -> None:
        self._arrivals += 1
        self._last_arrival = time.monotonic()

    # -- the watcher -----------------------------------------------------------------------------

    def _look_on(self) -> None:
        """Finds out that the thread whose turn it is waits in something unknown."""
        before: tuple[Any, ...] = ()
        looks, since, used_before = 0, 0.0, 0.0
        while not self._stop.wait(_LOOK_EVERY):
            with self._changed:
                current = self._current
                if current is None or self._free:
                    before = ()
                    continue
                ident, native, clock = self._clocks[current]
                try:
                    used = _used(clock)
                except OSError:  # the thread has ended meanwhile
                    continue
                if not _sleeps(native):  # it runs, or would if a processor were free
                    before = ()
                    continue
                frame = sys._current_frames().get(ident)
                now = (current, self._arrivals, id(frame), frame.f_lasti if frame else None)
                if now != before:
                    before, looks = now, 0
                    since, used_before = time.monotonic(), used
                    continue
                looks += 1
                busy = (used - used_before) / max(time.monotonic() - since, _LOOK_EVERY)
                others = any(
                    state == READY for role, state in self._states.items() if role != current
                )
                if looks >= _BLOCKED_AFTER and busy < _BUSY and others:
                    self._blocks(current)
                    self._arrived()
                    self._choose(None)
                    before = ()

    # -- results ---------------------------------------------------------------------------------

    def missed(self) -> str | None:
        """Why the run is not what the strategy wanted; None when it is."""
        with self._changed:
            return self._missed or self.strategy.missed()

    def schedule(self) -> Schedule:
        """What was passed, as a schedule."""
        with self._changed:
            facts = {"how": str(self.strategy), "points": " ".join(map(_one_word, self.points))}
            return Schedule.of_trace(self._trace, facts)

    def parted(self) -> str | None:
        """Where the run left the recorded trace; None when it did not, or there is none."""
        with self._changed:
            return parting(self._recorded, self._trace) if self._recorded else None

    def record(self) -> dict[str, Any]:
        """Plain data for a trial's record."""
        schedule, parted = self.schedule(), self.parted()
        return {
            "how": str(self.strategy),
            "text": str(schedule),
            "switches": schedule.switches,
            "controlled": parted is None,
            "parted": parted,
            "blocked": list(self.blocked),
            "decisions": [decision.as_dict() for decision in self.decisions],
            "missed": self.missed(),
        }


def _used(clock: int) -> float:
    """Seconds of processor time of the thread whose clock it is."""
    return time.clock_gettime(clock)


def _sleeps(native: int) -> bool:
    """Whether the kernel says so of a thread of this process; True where it cannot be asked."""
    try:
        with open(f"/proc/self/task/{native}/stat", "rb") as file:
            # Behind the name, which is in parentheses and may hold any byte.
            return file.read().rpartition(b") ")[2][:1] == b"S"
    except OSError:
        return True


class Recorder:
    """Writes down what a run without control passes, so that it has a schedule too.

    Args:
        how: :data:`FREE` or :data:`SCRIPTED`.
        points: the further points that the trial installs; the standard ones are there anyway.
    """

    def __init__(self, how: str, points: Iterable[str] = ()) -> None:
        self._how = how
        self._lock = threading.Lock()
        self._roles: frozenset[str] | None = None
        self._trace: list[Passed] = []
        standard = [point for point in SWITCH_POINTS if not to_install([point])]
        self._switch = Control(Preemptions(), points=(*standard, *to_install(points)))

    def begin(self, roles: Iterable[str]) -> None:
        """Names the crew: what other threads pass is not written down."""
        self._roles = frozenset(roles)

    def on_event(self, event: Event) -> None:
        """Called in the thread that arrives at a point."""
        with self._lock:
            if self._roles and event.thread in self._roles and self._switch._stops_at(event.point):
                self._trace.append((event.thread, event.point))

    def record(self) -> dict[str, Any]:
        """Plain data for a trial's record."""
        with self._lock:
            facts = {"how": self._how, "points": " ".join(map(_one_word, self._switch.points))}
            schedule = Schedule.of_trace(self._trace, facts)
        return {
            "how": self._how,
            "text": str(schedule),
            "switches": schedule.switches,
            "controlled": False,
            "parted": None,
            "missed": None,
        }


# -- plain data, for another process ---------------------------------------------------------------

VARIABLE = "RACE_CONTROL"


def from_spec(spec: Mapping[str, Any]) -> Control:
    """Makes the control that ``spec`` describes.

    ``{"strategy": "preemptions", "deviations": {"3": "thread-1"}}``,
    ``{"strategy": "pct", "seed": 1, "depth": 3, "length": 100}`` or
    ``{"strategy": "follow", "schedule": TEXT, "lenient": false}``; each with ``points`` and
    ``patience`` if wanted.

    Raises:
        ValueError: another strategy, or a schedule that cannot be read.
    """
    options: dict[str, Any] = {
        name: spec[name] for name in ("points", "patience") if spec.get(name) is not None
    }
    kind = spec.get("strategy")
    strategy: Strategy
    if kind == "preemptions":
        deviations = {int(number): who for number, who in spec.get("deviations", {}).items()}
        strategy = Preemptions(deviations)
    elif kind == "pct":
        strategy = Priorities(spec["seed"], depth=spec["depth"], length=spec["length"])
    elif kind == "follow":
        schedule = Schedule.parse(spec["schedule"])
        lenient = bool(spec.get("lenient", False))
        strategy = Follow(schedule.lines, lenient=lenient)
        if "points" in schedule.facts:
            options.setdefault("points", points_of(schedule))
        if not lenient:
            options["recorded"] = schedule.trace
    else:
        raise ValueError(f"there is no strategy {kind!r}: use preemptions, pct or follow")
    return Control(strategy, **options)


def points_of(schedule: Schedule) -> tuple[str, ...]:
    """The points at which a recorded run could be switched."""
    return tuple(word.replace("%20", " ") for word in schedule.facts["points"].split())


def _one_word(point: str) -> str:
    return point.replace(" ", "%20")


__all__ = ["SWITCH_POINTS", "Control", "Line", "Recorder", "from_spec", "points_of"]
