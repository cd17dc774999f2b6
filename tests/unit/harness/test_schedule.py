"""Scripts: their text form, the order that they force, and every way in which one is missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.points import POINTS, Event
from harness.schedule import Script, ScriptError, Step

Arrival = tuple[str, int | None]
STEPS = st.builds(
    Step,
    role=st.from_regex(r"[A-Za-z_][\w.-]{0,12}", fullmatch=True),
    point=st.sampled_from(sorted(POINTS)),
    step=st.none() | st.integers(0, 10**6),
    nth=st.integers(1, 99),
)


def play(script: Script, roles: dict[str, Sequence[Arrival]]) -> list[tuple[str, str]]:
    """Real threads that walk through their points; returns the order in which they passed."""
    order: list[tuple[str, str]] = []

    def walk(role: str, arrivals: Sequence[Arrival]) -> None:
        for point, step in arrivals:
            script.on_event(Event(point, role, step))
            order.append((role, point))
        script.thread_ended(role)

    threads = [threading.Thread(target=walk, args=item, daemon=True) for item in roles.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a script must not wait for ever"
    return order


@given(STEPS)
def test_what_a_step_prints_it_reads_back(step: Step) -> None:
    assert Step.parse(str(step)) == step


@given(st.text(max_size=40))
def test_any_text_is_a_step_or_one_line_that_says_why_not(text: str) -> None:
    try:
        step = Step.parse(text)
    except ScriptError as refused:
        line = str(refused)
    else:
        line = str(step)
        assert Step.parse(line) == step
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "expected 'THREAD POINT"),
        ("drafter-0", "expected 'THREAD POINT"),
        ("drafter-0 trace.middle", "no point is called 'trace.middle'"),
        ("drafter-0 trace.body step", "'step' is not step=N or nth=N"),
        ("drafter-0 trace.body step=", "'step=' is not"),
        ("drafter-0 trace.body step=-1", "'step=-1' is not"),
        ("drafter-0 trace.body step=two", "'step=two' is not"),
        ("drafter-0 trace.body step=²", "'step=²' is not"),
        ("drafter-0 trace.body when=3", "'when=3' is not"),
        ("drafter-0 trace.body step=1 step=2", "step is given twice"),
        ("drafter-0 trace.body nth=0", "nth counts from 1"),
    ],
)
def test_a_bad_line_is_refused_and_named(line: str, why: str) -> None:
    with pytest.raises(ScriptError) as caught:
        Script(["drafter-0 trace.begin", line])
    assert repr(line) in str(caught.value) and why in str(caught.value)


def test_a_line_that_stands_twice_could_never_be_passed() -> None:
    with pytest.raises(ScriptError, match="stands there twice: use nth=2"):
        Script(["a trace.body step=1", "b trace.body", "a trace.body step=1"])
    Script(["a trace.body step=1", "b trace.body", "a trace.body step=1 nth=2"])


@pytest.mark.parametrize("first", ["a", "b"])
def test_the_script_decides_the_order_whoever_comes_first(first: str) -> None:
    second = "b" if first == "a" else "a"
    script = Script(
        [
            f"{first} trace.body",
            f"{second} call.enter",
            f"{second} call.exit",
            f"{first} trace.end",
        ]
    )
    order = play(
        script,
        {
            second: [("call.enter", None), ("call.exit", None)],
            first: [("trace.body", None), ("trace.end", None)],
        },
    )
    assert script.missed() is None
    assert script.passed() == [str(step) for step in script.steps]
    # An entry is written after the point was passed, so only entries with a wait between count.
    assert order.index((first, "trace.body")) < order.index((first, "trace.end"))
    assert order.index((second, "call.enter")) < order.index((first, "trace.end"))


def test_an_early_thread_waits_until_the_earlier_step_has_been_passed() -> None:
    """One thread is held at its point: proved by what it has not done when the other goes."""
    script = Script(["a trace.body", "b call.enter"], patience=20)
    passed, at_the_point = threading.Event(), threading.Event()

    def early() -> None:
        at_the_point.set()
        script.on_event(Event("call.enter", "b"))
        passed.set()

    thread = threading.Thread(target=early, daemon=True)
    thread.start()
    assert at_the_point.wait(10)
    assert not passed.wait(0.1)
    script.on_event(Event("trace.body", "a"))
    assert passed.wait(10)
    assert script.missed() is None


def test_points_and_threads_that_the_script_does_not_name_are_free() -> None:
    script = Script(["a trace.body", "b call.enter step=3"])
    for event in (
        Event("trace.end", "a"),
        Event("call.enter", "c", 3),
        Event("call.enter", "b", 2),
        Event("call.exit", "b", 3),
    ):
        script.on_event(event)  # none of these waits for a's trace.body
    assert script.passed() == [] and script.missed() == "'a trace.body' was never reached"


def test_the_nth_arrival_within_a_work_step_is_the_one_that_counts() -> None:
    script = Script(["a call.enter step=1 nth=2"])
    for step in (0, 0, 1):
        script.on_event(Event("call.enter", "a", step))
    assert script.passed() == []
    script.on_event(Event("call.enter", "a", 1))
    assert script.missed() is None


def test_without_a_work_step_the_nth_arrival_counts_through_the_whole_run() -> None:
    script = Script(["a call.enter nth=3"])
    for step in (0, 1):
        script.on_event(Event("call.enter", "a", step))
    assert script.passed() == []
    script.on_event(Event("call.enter", "a", 2))
    assert script.missed() is None


def test_a_step_is_out_of_reach_at_once_when_its_thread_has_ended() -> None:
    script = Script(["a trace.body", "b call.enter"], patience=60)
    begun = time.monotonic()
    play(script, {"b": [("call.enter", None)], "a": [("trace.begin", None)]})
    assert time.monotonic() - begun < script.patience
    assert script.missed() == "'a trace.body' is out of reach: a has ended"
    assert script.passed() == []


def test_a_step_is_out_of_reach_at_once_when_its_thread_waits_at_a_later_one() -> None:
    """Otherwise both threads would stand there until their patience has run out."""
    script = Script(["a trace.body", "b call.enter", "a trace.end"], patience=60)
    begun = time.monotonic()
    play(script, {"a": [("trace.end", None)], "b": [("call.enter", None)]})
    assert time.monotonic() - begun < script.patience
    assert script.missed() == "'a trace.body' is out of reach: a waits at 'a trace.end'"


def test_patience_ends_and_the_message_says_who_waited_for_what() -> None:
    script = Script(["a trace.body step=4", "b call.enter"], patience=0.1)
    script.on_event(Event("call.enter", "b"))
    assert script.missed() == "'b call.enter' waited 0.1 s for 'a trace.body step=4'"


def test_a_missed_script_holds_nobody_any_more_and_stays_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(["a trace.body", "b call.enter", "c call.exit"], patience=0.1)
    script.on_event(Event("call.enter", "b"))
    why = script.missed()
    monkeypatch.setattr(script._changed, "wait", lambda _: pytest.fail("it waits"))
    script.on_event(Event("call.exit", "c"))
    script.on_event(Event("trace.body", "a"))
    assert script.missed() == why is not None
    assert script.passed() == []


def test_a_script_passed_in_part_names_the_first_step_that_nobody_reached() -> None:
    script = Script(["a trace.body", "a trace.end"])
    script.on_event(Event("trace.body", "a"))
    assert script.missed() == "'a trace.end' was never reached"
    assert script.passed() == ["a trace.body"]


def test_an_empty_script_is_passed() -> None:
    assert Script([]).missed() is None


def test_three_threads_follow_one_long_script_every_time() -> None:
    """Forced is n of n: a barrier shows the same order in a few runs of a hundred."""
    turns = [f"{role} call.enter step={n}" for n in range(20) for role in ("c", "a", "b")]
    for _ in range(5):
        script = Script(turns)
        play(script, {role: [("call.enter", n) for n in range(20)] for role in "abc"})
        assert script.missed() is None and script.passed() == turns
