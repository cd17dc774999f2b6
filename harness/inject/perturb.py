"""Seeded preemptions at the hook points of a program that runs freely.

A thread that is at a point where others can be hurt (inside an FX trace, between an annotation's
test and its write) may have to wait there until another thread, chosen by the seed, has passed a
point where one is hurt; and a thread that is about to be hurt may have to wait until another is
where it hurts. Which arrivals wait, and for whom, depends on the seed, the thread's name, the
point and the count of its arrivals there, not on the clock.

Nothing waits for ever: a wait ends when it is fulfilled, when every other thread that was seen
has ended, waits here too or waits for the compile lock, or after ``patience`` seconds. While few
waits have ended so, one may take longer: a program's first compiles import and trace for seconds.
The number of waits is limited, so that a long program is slowed down by a known amount at most.

Not covered: the program's own locks and queues (a thread that waits there looks as if it ran;
patience ends the wait), and exact replay: the same seed asks for the same waits, and the
interleaving between two waits is the operating system's.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from harness.points import Event

# Where a thread may be held -> what another thread must do meanwhile.
_HOLD: dict[str, tuple[str, ...]] = {
    "trace.body": ("call.settled",),
    "trace.end": ("call.settled",),
    "call.arrive": ("trace.body", "annotate.tested"),
    "annotate.tested": ("annotate.left",),
    "annotate.body": ("annotate.tested",),
}
# A seed draws how often an arrival waits, and whether annotations are perturbed too: who dies of
# one race does not get as far as the other.
_CHANCES = (0.4, 0.6, 0.8)
_TRACES = ("trace.body", "trace.end", "call.arrive")
_LIMIT = 200  # waits in one run
_EARLY, _LONGER = 10, 4  # so many waits that patience ended may each take so many times as long
_PATIENCE_ENDED = "patience ended"
_LOOK = 0.05  # seconds between two looks whether the others are still alive


@dataclass
class _Seat:
    """A thread as the scheduler knows it."""

    thread: threading.Thread
    name: str
    blocked: bool = False  # waits for the compile lock
    wants: tuple[str, ...] = ()  # held here until another passes one of these
    of: str | None = None  # that very thread, or None for anybody
    fulfilled_by: str | None = None


class Perturb:
    """A listener for :class:`harness.hooks.Hooks`; stands after the one that records.

    Args:
        seed: any integer; the same seed asks the same arrivals to wait.
        patience: seconds of one wait at most, but for the first ten that last so long: four
            times as many.
    """

    def __init__(self, seed: int, *, patience: float = 0.7) -> None:
        self.seed = seed
        self.patience = patience
        draw = random.Random(seed)
        self.chance = draw.choice(_CHANCES)
        self.points = draw.choice((_TRACES, tuple(_HOLD)))
        self.reset()

    def reset(self) -> None:
        """Forgets all threads and waits; a forked child starts here."""
        self.decisions: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._seats: dict[int, _Seat] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._owner: _Seat | None = None
        self._in_vain = 0  # waits that patience ended
        self._begun = time.monotonic()

    def on_event(self, event: Event) -> None:
        """Called in the thread that is at a point; returns when it may go on."""
        with self._changed:
            seat = self._seat(event)
            self._follow_lock(seat, event.point)
            for other in self._seats.values():
                if (
                    other is not seat
                    and event.point in other.wants
                    and other.of in (None, seat.name)
                ):
                    other.fulfilled_by = seat.name
            self._changed.notify_all()
            number = self._count(seat.name, event.point)
            goal = _HOLD[event.point] if event.point in self.points else None
            if goal is not None and len(self.decisions) < _LIMIT:
                self._maybe_hold(seat, event.point, number, goal)

    def schedule(self) -> dict[str, Any]:
        """Plain data for the report: the seed and every wait with how it ended."""
        with self._changed:
            return {
                "kind": "perturbed",
                "seed": self.seed,
                "patience_seconds": self.patience,
                "chance": self.chance,
                "points": list(self.points),
                "waits": list(self.decisions),
            }

    def _maybe_hold(self, seat: _Seat, point: str, number: int, goal: tuple[str, ...]) -> None:
        dice = random.Random(f"{self.seed}/{seat.name}/{point}/{number}")
        if dice.random() >= self.chance:
            return
        others = sorted(o.name for o in self._seats.values() if o is not seat and _alive(o))
        if not others and not self._strangers():
            return
        # Half of the waits are for one thread, so that priorities differ between seeds.
        seat.of = dice.choice(others) if others and dice.random() < 0.5 else None
        seat.wants, seat.fulfilled_by = goal, None
        begun = time.monotonic()
        longer = _LONGER if self._in_vain < _EARLY else 1
        ended = self._wait(seat, begun + self.patience * longer)
        self._in_vain += ended == _PATIENCE_ENDED
        seat.wants = ()
        self._changed.notify_all()  # whoever counted on this thread to go on
        self.decisions.append(
            {
                "t": round(begun - self._begun, 6),
                "thread": seat.name,
                "point": point,
                "nth": number,
                "until": f"{seat.of or 'another thread'} passes {' or '.join(goal)}",
                "seconds": round(time.monotonic() - begun, 6),
                "ended": ended,
            }
        )

    def _wait(self, seat: _Seat, deadline: float) -> str:
        while seat.fulfilled_by is None:
            if not self._anybody_else_moves(seat):
                return "nobody else could go on"
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return _PATIENCE_ENDED
            self._changed.wait(min(_LOOK, remaining))
        return f"fulfilled by {seat.fulfilled_by}"

    def _anybody_else_moves(self, seat: _Seat) -> bool:
        movers = [o for o in self._seats.values() if o is not seat and _alive(o)]
        if seat.of is not None and not any(o.name == seat.of for o in movers):
            return False
        if any(not o.blocked and not (o.wants and o.fulfilled_by is None) for o in movers):
            return True
        # All others are held or blocked. One is let go: the first by a draw of the seed.
        held = [o.name for o in (*movers, seat) if o.wants and o.fulfilled_by is None]
        first = min(held, key=lambda name: random.Random(f"{self.seed}/{name}").random())
        return self._strangers() if seat.name == first else True

    def _strangers(self) -> bool:
        """Whether a thread is alive that has not come to any point yet (main does not count)."""
        known = {o.thread for o in self._seats.values()}
        main = threading.main_thread()
        return any(t not in known and t is not main and not t.daemon for t in threading.enumerate())

    def _seat(self, event: Event) -> _Seat:
        ident = threading.get_ident()
        seat = self._seats.get(ident)
        if seat is None or seat.thread is not threading.current_thread():
            seat = self._seats[ident] = _Seat(threading.current_thread(), event.thread)
        return seat

    def _follow_lock(self, seat: _Seat, point: str) -> None:
        seat.blocked = point == "lock.wait" and self._owner not in (None, seat)
        if point == "lock.held":
            self._owner = seat
        elif point == "lock.released" and self._owner is seat:
            self._owner = None

    def _count(self, name: str, point: str) -> int:
        key = (name, point)
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key]


def _alive(seat: _Seat) -> bool:
    return seat.thread.is_alive()
