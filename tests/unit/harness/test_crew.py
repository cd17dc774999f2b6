"""Threads, their start patterns and their outcomes: decided by events, never by sleeping."""

from __future__ import annotations

import threading
import time

import pytest

from harness.control import Control
from harness.crew import COMPLETED, RAISED, UNFINISHED, Crew, CrewError, Member
from harness.strategies import Preemptions

NEVER = threading.Event()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def states(outcomes: list) -> dict[str, str]:
    return {outcome.thread: outcome.state for outcome in outcomes}


def join_threads_named(prefix: str) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            thread.join(10)
            assert not thread.is_alive()


def test_threads_are_named_after_the_crew_and_know_who_they_are() -> None:
    seen: dict[str, tuple[str, int]] = {}

    def work(member: Member) -> str:
        seen[member.name] = (threading.current_thread().name, member.index)
        return member.name.upper()

    outcomes = Crew(3, deadline=10).run(work)
    assert seen == {f"drafter-{i}": (f"drafter-{i}", i) for i in range(3)}
    assert [outcome.result for outcome in outcomes] == ["DRAFTER-0", "DRAFTER-1", "DRAFTER-2"]
    assert states(outcomes) == dict.fromkeys(seen, COMPLETED)


@pytest.mark.parametrize("after_step", [0, 1, 3])
def test_a_staggered_member_starts_when_its_predecessor_has_finished_the_step(
    after_step: int,
) -> None:
    """The pattern that shows the race: a warm thread steps on while the next one starts."""
    order: list[tuple[int, str]] = []

    def work(member: Member) -> None:
        order.append((member.index, "start"))
        for number in range(5):
            with member.step(number):
                order.append((member.index, f"step {number}"))

    Crew(3, after_step=after_step, deadline=20).run(work)
    for index in (1, 2):
        begun = order.index((index, "start"))
        assert order.index((index - 1, f"step {after_step}")) < begun


def test_a_staggered_successor_runs_beside_its_predecessor_not_after_it() -> None:
    successor_started = threading.Event()

    def work(member: Member) -> bool:
        if member.index == 1:
            successor_started.set()
            return True
        with member.step(0):
            pass
        return successor_started.wait(10)  # only a successor that runs at the same time sets it

    outcomes = Crew(2, after_step=0, deadline=20).run(work)
    assert [outcome.result for outcome in outcomes] == [True, True]


def test_the_successor_of_a_member_still_inside_the_step_has_not_started() -> None:
    """Negative control of the two above: an unfinished step releases nobody."""
    started = threading.Event()

    def work(member: Member) -> None:
        if member.index == 1:
            started.set()
            return
        with member.step(0):
            NEVER.wait(60)

    outcomes = Crew(2, after_step=0, deadline=0.3).run(work)
    assert states(outcomes) == {"drafter-0": UNFINISHED, "drafter-1": UNFINISHED}
    assert not started.is_set()
    assert "_await_start" in {frame.function for frame in outcomes[1].stack}


def test_together_waits_for_nobody() -> None:
    all_here = threading.Barrier(3)
    outcomes = Crew(3, start="together", deadline=20).run(lambda _: all_here.wait(10))
    assert {outcome.state for outcome in outcomes} == {COMPLETED}


@pytest.mark.parametrize("end", ["raises", "returns"])
def test_a_member_that_ends_early_releases_its_successor(end: str) -> None:
    def work(member: Member) -> None:
        if member.index == 0:
            with member.step(0):
                if end == "raises":
                    raise LookupError("dead at its first step")

    outcomes = Crew(2, after_step=7, deadline=30).run(work)
    first = RAISED if end == "raises" else COMPLETED
    assert states(outcomes) == {"drafter-0": first, "drafter-1": COMPLETED}


def test_what_a_thread_raised_is_its_outcome_and_names_the_step_that_it_reached() -> None:
    def work(member: Member) -> None:
        for number in range(3):
            with member.step(number):
                if number == 2:
                    raise KeyError("custom")

    (outcome,) = Crew(1, deadline=10).run(work)
    assert (outcome.state, outcome.steps) == (RAISED, 2)
    assert outcome.error is not None and outcome.error.type == "KeyError"
    assert outcome.error.raising is not None and outcome.error.raising.function == "work"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_exception_that_is_no_error_is_an_outcome_all_the_same(error: BaseException) -> None:
    def work(_: Member) -> None:
        raise error

    (outcome,) = Crew(1, deadline=10).run(work)
    assert outcome.state == RAISED
    assert outcome.error is not None and outcome.error.type == type(error).__name__


def test_an_exception_without_a_text_does_not_cost_the_outcome() -> None:
    def work(_: Member) -> None:
        raise Unprintable

    (outcome,) = Crew(1, deadline=10).run(work)
    assert outcome.state == RAISED
    assert outcome.error is not None and "ValueError" in outcome.error.message


def test_the_deadline_ends_a_run_with_a_thread_that_waits_for_ever() -> None:
    """SpecForge-like runs lost ten minutes because nobody noticed a thread that had stopped."""

    def work(member: Member) -> None:
        if member.index == 1:
            NEVER.wait(60)

    begun = time.monotonic()
    crew = Crew(2, start="together", deadline=0.4)
    outcomes = crew.run(work)
    took = time.monotonic() - begun
    assert 0.4 <= took < 60, "the thread was not waited for"
    assert states(outcomes) == {"drafter-0": COMPLETED, "drafter-1": UNFINISHED}
    stack = outcomes[1].stack
    assert stack[-1].function == "wait" and "work" in {frame.function for frame in stack}
    assert outcomes[0].stack == ()
    assert crew.members[1].stopping


def test_nobody_starts_after_the_deadline() -> None:
    """A successor that was still waiting must not run into whatever its process does next."""
    let_go, started = threading.Event(), threading.Event()

    def work(member: Member) -> None:
        if member.index == 0:
            let_go.wait(60)
        else:
            started.set()

    outcomes = Crew(2, deadline=0.3, name="late").run(work)
    assert states(outcomes) == {"late-0": UNFINISHED, "late-1": UNFINISHED}
    let_go.set()
    join_threads_named("late-")
    assert not started.is_set()


def test_a_late_end_does_not_change_the_verdict_that_was_given() -> None:
    let_go = threading.Event()
    (outcome,) = Crew(1, deadline=0.2, name="slow").run(lambda _: let_go.wait(60))
    let_go.set()
    join_threads_named("slow-")
    assert (outcome.state, outcome.result) == (UNFINISHED, None)


def test_an_extra_thread_has_its_own_function_and_starts_at_once() -> None:
    crew = Crew(1, name="worker", deadline=20)
    extra_runs = threading.Event()
    crew.add("tracer", lambda member: extra_runs.set() or member.name)
    outcomes = crew.run(lambda _: extra_runs.wait(10))
    assert [(o.thread, o.result) for o in outcomes] == [("worker-0", True), ("tracer", "tracer")]


def test_two_threads_of_one_name_would_hide_one_outcome() -> None:
    crew = Crew(2)
    crew.add("tracer", lambda _: None)
    for name in ("drafter-1", "tracer"):
        with pytest.raises(CrewError, match=f"called '{name}' already"):
            crew.add(name, lambda _: None)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "at least 1 thread, not 0"),
        (-2, {}, "at least 1 thread, not -2"),
        (1, {"start": "barrier"}, "unknown start pattern 'barrier': use staggered or together"),
        (1, {"deadline": 0}, "deadline must be positive and finite, not 0"),
        (1, {"deadline": -1.5}, "deadline must be positive and finite, not -1.5"),
        (1, {"deadline": float("nan")}, "not nan"),
        (1, {"deadline": float("inf")}, "not inf"),
        (1, {"after_step": -1}, "after_step cannot be -1"),
    ],
)
def test_a_crew_that_cannot_be_is_refused_in_one_line(
    size: int, options: dict, message: str
) -> None:
    with pytest.raises(CrewError) as caught:
        Crew(size, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_control_and_a_start_pattern_would_wait_for_each_other() -> None:
    control = Control(Preemptions())
    with pytest.raises(CrewError, match="a control decides who begins"):
        Crew(2, script=control)
    outcomes = Crew(2, script=control, start="together", deadline=20).run(lambda _: None)
    assert {outcome.state for outcome in outcomes} == {COMPLETED}


def test_a_crew_runs_once() -> None:
    crew = Crew(1, deadline=10)
    crew.run(lambda _: None)
    with pytest.raises(CrewError, match="runs once"):
        crew.run(lambda _: None)


def test_an_outcome_as_plain_data_leaves_the_result_behind() -> None:
    """A result may be anything, also what cannot be copied."""
    (outcome,) = Crew(1, deadline=10).run(lambda _: threading.Lock())
    data = outcome.as_dict()
    assert "result" not in data and data["state"] == COMPLETED


def test_stepping_announces_begin_and_end_but_no_end_of_a_step_that_failed() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.heard: list[object] = []

        def work_step(self, step: int | None) -> None:
            self.heard.append(step)

        def emit(self, point: str) -> None:
            self.heard.append(point)

    def work(member: Member) -> None:
        with member.step(0):
            pass
        with member.step(1):
            raise ValueError

    recorder = Recorder()
    Crew(1, deadline=10, hooks=recorder).run(work)  # type: ignore[arg-type]
    assert recorder.heard == [0, "step.begin", "step.end", None, 1, "step.begin", None]
