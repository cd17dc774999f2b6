"""Makes a failing schedule small: leaves switches out as long as it fails in the same way.

Delta debugging over the schedule's lines: a line that is left out lets the thread before it run
on. Each attempt is one fresh process, and what counts is the schedule that the attempt really
passed, if it has fewer switches; one that missed it, or left no record, does not count. The
result has been run once more, as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.explore import no_record
from harness.replay import Line, Schedule, merged
from harness.verdict import Record, judge

Run = Callable[..., dict[str, Any]]  # Runner.replay


@dataclass(frozen=True)
class Shrunk:
    """A smaller schedule.

    Attributes:
        schedule: it.
        tried: attempts, each a fresh process.
        before: switches of the original.
        holds: whether the result, run once more, failed in the same way with the same trace.
    """

    schedule: Schedule
    tried: int
    before: int
    holds: bool

    def __str__(self) -> str:
        stays = "holds" if self.holds else "does not hold when it is run again"
        now = self.schedule.switches
        return f"{self.before} switches -> {now}, {self.tried} attempts; the result {stays}"


def same_verdict(schedule: Schedule) -> Callable[[Record], bool]:
    """Keeps what has the verdict that the schedule's header names."""
    return lambda record: str(judge(record)) == schedule.facts.get("verdict")


def shrink(
    schedule: Schedule,
    run: Run,
    keep: Callable[[Record], bool] | None = None,
    *,
    attempts: int = 200,
) -> Shrunk:
    """Leaves switches out while ``keep`` says that the run still fails in the same way.

    Args:
        schedule: one that fails.
        run: ``run(schedule, lenient=True)`` gives the record of a run
            (:meth:`harness.explore.Runner.replay`).
        keep: default: the verdict is the one in the schedule's header.
        attempts: most runs before the one that checks the result.

    Raises:
        ValueError: the schedule itself does not fail in that way.
    """
    keep = keep or same_verdict(schedule)
    first = run(replace(schedule, trace=()), lenient=True)
    tried = 1
    if (why := _unusable(first)) is not None:
        raise ValueError(f"the schedule itself cannot be repeated: {why}")
    if not keep(first):
        raise ValueError(f"the schedule itself does not show it: its verdict is {judge(first)}")
    best = _passed(schedule, first)
    size = max(1, len(best.lines) // 2)
    while size >= 1:
        for lines in _without(best.lines, size):
            if tried >= attempts:
                break
            record = run(Schedule(lines, dict(best.facts)), lenient=True)
            tried += 1
            if _unusable(record) is None and keep(record):
                passed = _passed(schedule, record)
                if passed.switches < best.switches:
                    best = passed
                    size = max(1, min(size, len(best.lines) // 2))
                    break  # start again on the smaller one
        else:
            size //= 2
            continue
        if tried >= attempts:
            break
    last = run(best)
    holds = _unusable(last) is None and keep(last) and bool(last["schedule"].get("controlled"))
    return Shrunk(best, tried + 1, schedule.switches, holds)


def _unusable(record: Record) -> str | None:
    """Why a run says nothing of its schedule, if so."""
    if "schedule" not in record:
        return no_record(record)
    missed: str | None = record.get("script", {}).get("missed")
    return missed


def _passed(original: Schedule, record: Record) -> Schedule:
    """The schedule that a run really had, with the original's header."""
    passed = Schedule.parse(record["schedule"]["text"])
    return replace(passed, facts=original.facts | {"how": "shrunk"})


def _without(lines: tuple[Line, ...], size: int) -> Iterator[tuple[Line, ...]]:
    seen = set()
    for start in range(0, len(lines), size):
        kept = merged(lines[:start] + lines[start + size :])
        if kept and kept != lines and kept not in seen:
            seen.add(kept)
            yield kept
