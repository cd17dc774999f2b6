"""Schedules as text: what is written is read back, what is something else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.replay import HEAD, Line, Schedule, ScheduleError, merged, parting

THREADS = st.sampled_from(["a", "thread-1", "tracer", "data loader", "#1", "torch:", "100%20", "%"])
POINTS = st.sampled_from(
    ["trace.body", "end", "m:f@line:/x = 1 % 2/", "torch/fx/node.py:12", "a*2", "%20"]
)
TRACES = st.lists(st.tuples(THREADS, POINTS), max_size=30)


@given(TRACES)
def test_a_schedule_is_read_back_as_it_was_written(trace) -> None:
    schedule = Schedule.of_trace(trace, {"torch": "2.13.0", "how": "free: as it came"})
    assert Schedule.parse(str(schedule)) == schedule


@given(st.text(max_size=60))
def test_any_text_is_a_schedule_or_an_error_of_one_line(text: str) -> None:
    for candidate in (text, f"{HEAD}\n{text}", f"{HEAD}\ntrace:\n{text}"):
        try:
            said = str(Schedule.parse(candidate))
        except ScheduleError as refused:
            said = str(refused)
            assert len(said.splitlines()) == 1
        else:
            assert str(Schedule.parse(said)) == said


def test_lines_say_where_each_slice_ends() -> None:
    trace = [("a", "p"), ("a", "p"), ("b", "p"), ("a", "p"), ("a", "end"), ("b", "end")]
    schedule = Schedule.of_trace(trace)
    assert [str(line) for line in schedule.lines] == ["a p nth=2", "b p", "a end", "b end"]
    assert schedule.switches == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "its first line must be"),
        ("schedule v2\na end\n", "its first line must be"),
        ("schedule v1\na\n", "expected 'THREAD POINT"),
        ("schedule v1\na trace.body nth=0\n", "'nth=0' is not nth=N"),
        ("schedule v1\na trace.body twice\n", "'twice' is not nth=N"),
        ("schedule v1\na end\ntrace:\nno colon\n", "expected 'THREAD: POINT"),
    ],
)
def test_a_bad_schedule_is_refused_and_its_line_named(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Schedule.parse(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"absent\.schedule: cannot be read"):
        Schedule.load(tmp_path / "absent.schedule")


def test_comments_and_blank_lines_are_left_out() -> None:
    text = "# by hand\nschedule v1\n\n# two lines\na trace.body\n\nb end\n"
    assert [str(line) for line in Schedule.parse(text).lines] == ["a trace.body", "b end"]


def test_where_two_traces_part() -> None:
    one = [("a", "p"), ("b", "q"), ("a", "end")]
    assert parting(one, one) is None
    other = [("a", "p"), ("a", "end")]
    assert parting(one, other) == ("the traces part at point 2, after a p: recorded b q, now a end")
    assert "now nothing more" in str(parting(one, one[:2]))
    assert "after the start: recorded nothing more" in str(parting([], one))


def test_a_line_left_out_lets_the_thread_before_it_run_on() -> None:
    lines = [Line("a", "p"), Line("a", "end"), Line("b", "end")]
    assert merged(lines) == (Line("a", "end"), Line("b", "end"))
