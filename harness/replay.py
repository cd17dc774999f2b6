"""A schedule as text: which thread ran until which point, slice after slice.

::

    schedule v1
    torch: 2.13.0
    points: trace.* patch.* step.* lock.wait
    thread-0 trace.body
    thread-1 trace.body nth=2
    thread-0 end
    thread-1 end
    trace:
    thread-0: step.begin trace.begin trace.body
    ...

``thread-0 trace.body`` means: thread-0 runs until it stands at its first arrival at that point,
then the thread of the next line runs. What is not one word is written with ``%20`` for its
blanks. Two words are no points: ``end`` (the thread has ended) and
``blocked`` (it waits in something that the harness does not control). A schedule of n lines has
n-1 context switches.

The trace behind it is what was really passed. A replay whose trace is another says where the two
part, and is *uncontrolled*.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from urllib.parse import quote, unquote

HEAD = "schedule v1"
END, BLOCKED = "end", "blocked"
_KEY = re.compile(r"([a-z]+): (.*)")
_SLICE = re.compile(r"(\S+):((?: \S+)*)")

Passed = tuple[str, str]  # thread, point


class ScheduleError(ValueError):
    """A schedule cannot be read; the message names the line."""


@dataclass(frozen=True)
class Line:
    """Thread ``thread`` runs until it stands at its ``nth`` arrival at ``point``."""

    thread: str
    point: str
    nth: int = 1

    def __str__(self) -> str:
        count = f" nth={self.nth}" if self.nth != 1 else ""
        return f"{_quote_name(self.thread)} {_quote(self.point)}{count}"

    @classmethod
    def parse(cls, text: str) -> Line:
        """Reads the form that :meth:`__str__` writes."""
        words = text.split(" ")
        if len(words) not in (2, 3) or not all(words):
            raise ScheduleError(f"schedule line {text!r}: expected 'THREAD POINT [nth=N]'")
        nth = 1
        if len(words) == 3:
            match = re.fullmatch(r"nth=([1-9]\d*)", words[2], re.ASCII)
            if match is None:
                raise ScheduleError(f"schedule line {text!r}: {words[2]!r} is not nth=N")
            nth = int(match[1])
        return cls(unquote(words[0]), _unquote(words[1]), nth)


@dataclass(frozen=True)
class Schedule:
    """Lines, what is known about the run, and its trace.

    Attributes:
        lines: one per slice.
        facts: header lines ``name: value``, in order (``torch``, ``points``, ``test``, ...).
        trace: what was passed, in order; empty when the schedule was written by hand.
    """

    lines: tuple[Line, ...]
    facts: dict[str, str] = field(default_factory=dict)
    trace: tuple[Passed, ...] = ()

    @property
    def switches(self) -> int:
        """Number of context switches."""
        return max(0, len(self.lines) - 1)

    def __str__(self) -> str:
        rows = [HEAD, *(f"{name}: {value}" for name, value in self.facts.items())]
        rows += [str(line) for line in self.lines]
        if self.trace:
            rows.append("trace:")
            for thread, group in groupby(self.trace, key=lambda passed: passed[0]):
                rows.append(
                    " ".join((f"{_quote_name(thread)}:", *_runs(point for _, point in group)))
                )
        return "\n".join(rows) + "\n"

    def with_facts(self, **facts: str) -> Schedule:
        """The same with further header lines."""
        return replace(self, facts=self.facts | facts)

    @classmethod
    def of_trace(cls, trace: Sequence[Passed], facts: dict[str, str] | None = None) -> Schedule:
        """The schedule of a run that passed ``trace``."""
        counts: Counter[Passed] = Counter()
        lines = []
        for thread, group in groupby(trace, key=lambda passed: passed[0]):
            for _, point in group:
                counts[thread, point] += 1
                line = Line(thread, point, counts[thread, point])
            lines.append(line)
        return cls(tuple(lines), dict(facts or {}), tuple(trace))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads the form that :meth:`__str__` writes; blank lines and ``#`` lines are left out.

        Raises:
            ScheduleError: the text is something else.
        """
        rows = [row.rstrip() for row in text.splitlines()]
        rows = [row for row in rows if row and not row.startswith("#")]
        if not rows or rows[0] != HEAD:
            raise ScheduleError(f"this is no schedule: its first line must be {HEAD!r}")
        facts: dict[str, str] = {}
        lines: list[Line] = []
        trace: list[Passed] = []
        in_trace = False
        for row in rows[1:]:
            if in_trace:
                trace += _read_slice(row)
            elif row == "trace:":
                in_trace = True
            elif (match := _KEY.fullmatch(row)) is not None and not lines:
                facts[match[1]] = match[2]
            else:
                lines.append(Line.parse(row))
        return cls(tuple(lines), facts, tuple(trace))

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Reads a file.

        Raises:
            ScheduleError: it cannot be read, or is no schedule.
        """
        try:
            return cls.parse(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ScheduleError(f"{path}: cannot be read ({why})") from error
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Writes a file, and its folder if there is none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self))


def parting(recorded: Sequence[Passed], now: Sequence[Passed]) -> str | None:
    """Where two traces part, in one line; None when they are the same."""
    for number, (old, new) in enumerate(zip_longest(recorded, now), start=1):
        if old != new:
            before = " ".join(recorded[number - 2]) if number > 1 else "the start"
            was = " ".join(old) if old else "nothing more"
            what = " ".join(new) if new else "nothing more"
            return f"the traces part at point {number}, after {before}: recorded {was}, now {what}"
    return None


def merged(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Adjacent lines of one thread become the last of them: there is no switch between them."""
    return tuple(list(group)[-1] for _, group in groupby(lines, key=lambda line: line.thread))


def _runs(points: Iterable[str]) -> Iterable[str]:
    for point, group in groupby(points):
        count = len(list(group))
        yield _quote(point) + (f"*{count}" if count > 1 else "")


def _read_slice(row: str) -> Iterable[Passed]:
    match = _SLICE.fullmatch(row)
    if match is None:
        raise ScheduleError(f"trace line {row!r}: expected 'THREAD: POINT POINT ...'")
    for word in match[2].split():
        repeated = re.fullmatch(r"(.+)\*([1-9]\d{0,6})", word, re.ASCII)
        point, count = (repeated[1], int(repeated[2])) if repeated else (word, 1)
        for _ in range(count):
            yield unquote(match[1]), _unquote(point)


def _quote(point: str) -> str:
    return point.replace("%", "%25").replace(" ", "%20").replace("*", "%2A")


def _quote_name(thread: str) -> str:
    """A thread's name may hold anything, also what begins a comment or ends a header's name."""
    return "".join(c if c.isalnum() or c in "-_.()[]/" else quote(c, safe="") for c in thread)


def _unquote(point: str) -> str:
    return point.replace("%2A", "*").replace("%20", " ").replace("%25", "%")
