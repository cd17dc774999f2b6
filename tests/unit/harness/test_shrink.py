"""Shrinking takes over what an attempt has shown, and nothing of one that has shown nothing."""

from __future__ import annotations

from typing import Any

import pytest

from harness.replay import Schedule
from harness.shrink import shrink

LONG = Schedule.parse("schedule v1\na p\nb p\na q\nb q\na end\nb end\n")


def record_of(schedule: Schedule, missed: str | None = None) -> dict[str, Any]:
    """What a run that passed exactly these lines returns."""
    trace = tuple((line.thread, line.point) for line in schedule.lines)
    text = str(Schedule(schedule.lines, {}, trace))
    return {"schedule": {"text": text, "controlled": True}, "script": {"missed": missed}}


def always(_: Any) -> bool:
    return True


def test_every_switch_goes_that_makes_no_difference() -> None:
    def run(schedule: Schedule, *, lenient: bool = False) -> dict[str, Any]:
        return record_of(schedule)

    small = shrink(LONG, run, always)
    assert small.before == 5 and small.schedule.switches == 0 and small.holds


def test_an_attempt_that_was_missed_is_not_taken_over() -> None:
    """All were set free at some time: what was passed then is no schedule of anybody's."""

    def run(schedule: Schedule, *, lenient: bool = False) -> dict[str, Any]:
        whole = schedule.lines == LONG.lines
        return record_of(schedule, None if whole else "a stood at p for 30 s: nobody could run")

    small = shrink(LONG, run, always)
    assert small.schedule.lines == LONG.lines and small.holds


def test_an_attempt_whose_process_died_is_not_taken_over() -> None:
    def run(schedule: Schedule, *, lenient: bool = False) -> dict[str, Any]:
        whole = schedule.lines == LONG.lines
        return record_of(schedule) if whole else {"process": {"what": "died by SIGSEGV"}}

    small = shrink(LONG, run, always)
    assert small.schedule.lines == LONG.lines and small.holds


def test_a_schedule_whose_process_dies_is_refused_in_one_line() -> None:
    def run(schedule: Schedule, *, lenient: bool = False) -> dict[str, Any]:
        return {"process": {"ended": "signal", "what": "died by SIGSEGV"}}

    with pytest.raises(ValueError, match=r"cannot be repeated: .* no record: died by SIGSEGV$"):
        shrink(LONG, run, always)


def test_a_result_that_goes_another_way_the_second_time_does_not_hold() -> None:
    def run(schedule: Schedule, *, lenient: bool = False) -> dict[str, Any]:
        record = record_of(schedule)
        return record if lenient else record | {"script": {"missed": "uncontrolled: they part"}}

    assert not shrink(LONG, run, always).holds
