"""Which thread runs next: seeded random priorities, up to k preemptions, or a recorded schedule.

A strategy is asked at each arrival of a thread at a point and names one of the threads that can
run. It sees nothing but the choice, so the same strategy makes the same choices in every run
that offers the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.replay import BLOCKED, END, Line


@dataclass(frozen=True)
class Choice:
    """What a strategy is asked.

    Attributes:
        number: how many choices there were before.
        current: the thread that has just arrived, if it could go on; None when it has ended, or
            waits for a lock or in something else.
        options: the threads that can run, in the crew's order; never empty.
        standing: thread -> (point, nth) where it stands.
        counts: (thread, point) -> arrivals so far.
        ended: threads that have ended.
    """

    number: int
    current: str | None
    options: tuple[str, ...]
    standing: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()


class Strategy(Protocol):
    """What :class:`harness.control.Control` asks."""

    def choose(self, choice: Choice) -> str:
        """One of ``choice.options``."""

    def missed(self) -> str | None:
        """Why the strategy could not do what it was made for; None when it could."""

    def __str__(self) -> str:
        """One line for the schedule's header."""


def stay(choice: Choice) -> str:
    """No preemption: the thread that can go on does, else the first that can run."""
    return choice.options[0] if choice.current is None else choice.current


class Preemptions:
    """Stays with a thread until it ends or waits, but for the given deviations.

    Args:
        deviations: number of a choice -> the thread to take there.
    """

    def __init__(self, deviations: Mapping[int, str] | None = None) -> None:
        self.deviations = dict(deviations or {})
        self._missed: str | None = None

    def choose(self, choice: Choice) -> str:
        wanted = self.deviations.get(choice.number)
        if wanted is None:
            return stay(choice)
        if wanted not in choice.options:
            self._missed = self._missed or f"choice {choice.number}: {wanted} cannot run here"
            return stay(choice)
        return wanted

    def missed(self) -> str | None:
        return self._missed

    def __str__(self) -> str:
        where = ", ".join(f"{number} {thread}" for number, thread in self.deviations.items())
        return f"preemptions ({where or 'none'})"


class Priorities:
    """Probabilistic concurrency testing: random priorities, d-1 random points of change.

    The thread with the highest priority runs; at a point of change the running one falls below
    all others. A bug that needs d ordered steps is hit with a probability of at least
    1 / (threads * length ** (d-1)) per seed.

    Args:
        seed: of the random numbers.
        depth: d, at least 1.
        length: about how many choices a run makes.
    """

    def __init__(self, seed: int, *, depth: int = 3, length: int = 100) -> None:
        if depth < 1 or length < 1:
            raise ValueError(f"depth and length count from 1, not {depth} and {length}")
        self.seed, self.depth, self.length = seed, depth, length
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(1, length + 1) for _ in range(depth - 1)}
        self._priority: dict[str, float] = {}
        self._lowest = 0.0

    def choose(self, choice: Choice) -> str:
        for thread in choice.options:
            if thread not in self._priority:
                self._priority[thread] = 1.0 + self._random.random()
        if choice.number in self._changes and choice.current is not None:
            self._lowest -= 1.0
            self._priority[choice.current] = self._lowest
        return max(choice.options, key=lambda thread: self._priority[thread])

    def missed(self) -> str | None:
        return None

    def __str__(self) -> str:
        return f"pct seed={self.seed} depth={self.depth} length={self.length}"


class Follow:
    """Follows the lines of a schedule; after the last one it stays with whoever runs.

    Args:
        lines: of :class:`harness.replay.Schedule`.
        lenient: a line that cannot be followed is left out without a word (for shrinking).
    """

    def __init__(self, lines: Sequence[Line], *, lenient: bool = False) -> None:
        self.lines = tuple(lines)
        self._lenient = lenient
        self._next = 0
        self._missed: str | None = None

    def choose(self, choice: Choice) -> str:
        while self._next < len(self.lines):
            line = self.lines[self._next]
            why = self._over(line, choice)
            if why is None:
                return line.thread
            if why:
                self._miss(self._next, why)
            self._next += 1
        return stay(choice)

    def missed(self) -> str | None:
        if self._missed is None and not self._lenient:
            for index in range(self._next, len(self.lines)):
                if self.lines[index].point not in (END, BLOCKED):
                    self._miss(index, "it was never reached")
                    break
        return self._missed

    def __str__(self) -> str:
        return f"replay of {len(self.lines)} lines"

    def _over(self, line: Line, choice: Choice) -> str | None:
        """None: the line's thread has to run. "": the line is done. Else why it cannot be."""
        thread = line.thread
        if thread in choice.ended:
            return "" if line.point == END else f"{thread} has ended"
        if thread not in choice.options:
            if line.point == BLOCKED or choice.standing.get(thread) == (line.point, line.nth):
                return ""
            return f"{thread} cannot run here"
        at = choice.standing.get(thread)
        if at == (line.point, line.nth):
            return ""
        passed = choice.counts.get((thread, line.point), 0)
        if line.point not in (END, BLOCKED) and passed >= line.nth:
            return f"{thread} has passed it already"
        return None

    def _miss(self, index: int, why: str) -> None:
        if self._missed is None and not self._lenient:
            line = f"line {index + 1} '{self.lines[index]}'"
            self._missed = f"{line} of the schedule cannot be followed: {why}"
