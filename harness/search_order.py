"""Which schedules a search tries, and in which order; it runs nothing itself.

An order is iterated for the next run's strategy, as :func:`harness.control.from_spec` takes it, and
is shown each run's record: ``parted`` says where the run left the one that it varies, ``learn``
takes from it what else can be tried. The exhaustive order is by :class:`FewestFirst`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from harness.verdict import Record
from harness.watch import WRITES

# preemptions, whether state is written elsewhere, earlier arrivals there, order of discovery
_Rank = tuple[int, bool, int, int]
_Decisions = list[dict[str, Any]]


class FewestFirst:
    """All schedules with up to ``bound`` preemptions, those with fewer first."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._order = itertools.count()
        # With each schedule the decisions of the run that it varies, to see that it does so.
        first: tuple[_Rank, dict[int, str], _Decisions] = ((0, False, 0, next(self._order)), {}, [])
        self._heap = [first]
        self._varied: _Decisions = []
        self._used = 0
        self.words = f"up to {bound} preemptions"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._heap:
            (self._used, *_), deviations, self._varied = heapq.heappop(self._heap)
            plain = {str(number): thread for number, thread in deviations.items()}
            yield {"strategy": "preemptions", "deviations": plain}

    def learn(self, spec: Mapping[str, Any], record: Record) -> None:
        """Every other choice after the last deviation is one more schedule."""
        deviations = {int(number): thread for number, thread in spec["deviations"].items()}
        decisions = record["schedule"]["decisions"]
        last = max(deviations, default=-1)
        arrivals: Counter[tuple[str | None, str | None]] = Counter()
        for number, decision in enumerate(decisions):
            current, at = decision["current"], decision["at"]
            preempts = current is not None
            cost = self._used + preempts
            if number > last and cost <= self._bound:
                elsewhere = preempts and at not in WRITES
                earlier = arrivals[current, at] if preempts else 0
                for thread in decision["options"]:
                    if thread != decision["chosen"]:
                        rank = (cost, elsewhere, earlier, next(self._order))
                        entry = (rank, deviations | {number: thread}, decisions)
                        heapq.heappush(self._heap, entry)
            arrivals[current, at] += 1

    def parted(self, spec: Mapping[str, Any], record: Record) -> str | None:
        """Where the run left the one that it varies, up to its last deviation; None: nowhere."""
        last = max(map(int, spec["deviations"]), default=-1)
        decisions = record["schedule"]["decisions"]
        for number, old in enumerate(self._varied[: last + 1]):
            new = decisions[number] if number < len(decisions) else {}
            keys = ("options", "current", "at", *(("chosen",) if number < last else ()))
            if any(new.get(key) != old[key] for key in keys):
                return f"choice {number} is another one than in the run that it varies"
        return None

    def waiting(self) -> int:
        """Schedules that are known and were not given out."""
        return len(self._heap)


class Seeds:
    """Random priorities, seed after seed."""

    def __init__(self, seeds: int, depth: int, first: Record) -> None:
        self._seeds = seeds
        self._depth = depth
        self._length = max(1, len(first.get("schedule", {}).get("decisions", ())))
        self._next = 0
        self.words = f"random priorities of depth {depth}, seeds 0 to {seeds - 1}"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < self._seeds:
            seed, self._next = self._next, self._next + 1
            yield {
                "strategy": "pct",
                "seed": seed,
                "depth": self._depth,
                "length": self._length,
            }

    def parted(self, spec: Mapping[str, Any], record: Record) -> str | None:
        """Seeds do not depend on each other."""
        return None

    def learn(self, spec: Mapping[str, Any], record: Record) -> None:
        """Seeds do not depend on each other."""

    def waiting(self) -> int:
        """Seeds that were not given out."""
        return self._seeds - self._next
