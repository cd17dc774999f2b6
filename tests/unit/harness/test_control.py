"""One thread at a time, in the strategy's order; whoever waits elsewhere is recognised."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import control as control_module
from harness.control import Control, from_spec
from harness.crew import Crew, Member, Outcome
from harness.linewise import Lines
from harness.points import Event
from harness.replay import Line, Schedule
from harness.strategies import Choice, Follow, Preemptions, Priorities, Strategy

POINTS = ("p", "q", "lock.wait")
Work = Callable[[Callable[..., None]], object]


def play(control: Control, works: list[Work], deadline: float = 20.0) -> list[Outcome]:
    """Real threads; each work is given the function that arrives at a point."""

    def run(member: Member) -> object:
        def at(point: str, what: str = "") -> None:
            control.on_event(Event(point, member.name, None, None, 0, what))

        return works[member.index](at)

    crew = Crew(len(works), name="t", start="together", deadline=deadline, script=control)
    return crew.run(run)


def controlled(strategy: Strategy, **options: object) -> Control:
    return Control(strategy, **({"points": POINTS, "patience": 10.0} | options))  # type: ignore[arg-type]


def walk(at: Callable[..., None]) -> None:
    at("p")
    at("q")


def lines(control: Control) -> list[str]:
    return [str(line) for line in control.schedule().lines]


def test_without_a_preemption_each_thread_runs_to_its_end() -> None:
    control = controlled(Preemptions())
    play(control, [walk, walk, walk])
    assert lines(control) == ["t-0 end", "t-1 end", "t-2 end"]
    assert control.missed() is None and control.schedule().switches == 2


def test_a_preemption_lets_another_one_run_and_the_first_goes_on_later() -> None:
    control = controlled(Preemptions({1: "t-1"}))  # choice 0 is the start, 1 is t-0's p
    play(control, [walk, walk])
    assert lines(control) == ["t-0 p", "t-1 end", "t-0 end"]


def test_only_one_thread_is_between_two_points_at_any_time() -> None:
    inside, worst = 0, 0

    def work(at: Callable[..., None]) -> None:
        nonlocal inside, worst
        for _ in range(50):
            at("p")
            inside += 1
            worst = max(worst, inside)
            inside -= 1

    for seed in range(5):
        control = controlled(Priorities(seed, depth=4, length=150))
        play(control, [work, work, work])
    assert worst == 1
    assert control.schedule().switches > 2, "control: there were switches"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_the_same_seed_gives_the_same_trace_and_its_schedule_repeats_it(seed, depth) -> None:
    traces = []
    for _ in range(2):
        control = controlled(Priorities(seed, depth=depth, length=8))
        play(control, [walk, walk, walk])
        traces.append(control.schedule().trace)
    assert traces[0] == traces[1]
    again = from_spec({"strategy": "follow", "schedule": str(control.schedule())})
    play(again, [walk, walk, walk])
    assert again.missed() is None and again.parted() is None
    assert again.schedule().trace == traces[0]


def test_all_schedules_with_one_preemption_are_different() -> None:
    seen = set()
    for number in range(1, 5):
        control = controlled(Preemptions({number: "t-1"}))
        play(control, [walk, walk])
        if control.missed() is None:
            seen.add(tuple(lines(control)))
    assert ("t-0 p", "t-1 end", "t-0 end") in seen and ("t-0 q", "t-1 end", "t-0 end") in seen


# -- locks and other waits -----------------------------------------------------------------------


def locked(lock: threading.Lock) -> Work:
    """Takes a lock as the hooks report it, and meets a point while it holds it."""

    def work(at: Callable[..., None]) -> None:
        at("lock.wait", "L")
        with lock:
            at("lock.held", "L")
            at("p")
        at("lock.released", "L")
        at("q")

    return work


def test_nobody_runs_into_a_lock_that_a_standing_thread_holds() -> None:
    """t-0 is stopped while it holds the lock; t-1 asks for it, and t-0 has to go on."""
    lock = threading.Lock()
    control = controlled(Preemptions({2: "t-1"}))
    outcomes = play(control, [locked(lock), locked(lock)])
    assert [outcome.state for outcome in outcomes] == ["completed"] * 2
    assert lines(control)[:2] == ["t-0 p", "t-1 lock.wait"]
    assert control.blocked == [], "known without waiting for it"


def test_nobody_runs_into_a_lock_that_was_free_when_it_was_asked_for() -> None:
    """t-0 stands before the lock; t-1 takes it meanwhile, and is stopped while it has it."""
    lock = threading.Lock()
    control = controlled(Preemptions({1: "t-1"}))
    outcomes = play(control, [locked(lock), locked(lock)])
    assert [outcome.state for outcome in outcomes] == ["completed"] * 2
    options = {(d.current, d.at): d.options for d in control.decisions}
    assert options["t-1", "lock.wait"] == ("t-0", "t-1"), "control: the lock is free"
    assert options["t-1", "p"] == ("t-1",)
    assert options["t-1", "q"] == ("t-0", "t-1"), "given back"
    assert control.blocked == []


def test_three_threads_that_want_one_lock_never_run_into_it() -> None:
    for seed in range(10):
        lock = threading.Lock()
        control = controlled(Priorities(seed, depth=6, length=20))
        outcomes = play(control, [locked(lock)] * 3)
        assert [outcome.state for outcome in outcomes] == ["completed"] * 3
        assert control.blocked == [] and control.missed() is None


def test_a_lock_is_known_though_nobody_asked_for_its_point() -> None:
    lock = threading.Lock()
    control = controlled(Preemptions({1: "t-1"}), points=("p", "q"))
    play(control, [locked(lock), locked(lock)])
    assert lines(control)[:2] == ["t-0 p", "t-1 lock.wait"]
    assert control.blocked == [] and control.missed() is None
    again = from_spec({"strategy": "follow", "schedule": str(control.schedule())})
    play(again, [locked(lock), locked(lock)])
    assert again.missed() is None and again.parted() is None


@pytest.mark.parametrize("kind", ["lock", "event", "join"])
def test_a_thread_that_waits_elsewhere_is_recognised_and_another_runs(kind: str) -> None:
    lock, event = threading.Lock(), threading.Event()

    def first(at: Callable[..., None]) -> None:
        at("p")  # the other one takes the lock, and stops at its p
        if kind == "lock":
            with lock:
                pass
        elif kind == "event":
            event.wait()
        else:
            helper = threading.Thread(target=event.wait)
            helper.start()
            helper.join()
        at("q")

    def second(at: Callable[..., None]) -> None:
        with lock:
            at("p")
        event.set()
        at("q")

    control = controlled(Preemptions({1: "t-1", 2: "t-0"}))
    outcomes = play(control, [first, second])
    assert [outcome.state for outcome in outcomes] == ["completed"] * 2
    assert control.blocked == ["t-0"] and "t-0 blocked" in lines(control)
    assert control.missed() is None


def test_a_thread_that_only_computes_is_not_taken_for_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the machine is so busy that it gets no processor to speak of."""

    def compute(at: Callable[..., None]) -> int:
        at("p")
        # One instruction of ours, without the GIL: the frame does not move, the watcher looks.
        digest = hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)
        at("q")
        return len(digest)

    monkeypatch.setattr(control_module, "_used", lambda _: 0.0)
    control = controlled(Preemptions())
    play(control, [compute, walk])
    assert control.blocked == [] and lines(control) == ["t-0 end", "t-1 end"]


def test_two_threads_that_wait_for_each_other_are_left_to_the_crews_deadline() -> None:
    one, two = threading.Lock(), threading.Lock()

    def deadlock(mine: threading.Lock, other: threading.Lock) -> Work:
        def work(at: Callable[..., None]) -> None:
            with mine:
                at("p")
                with other:
                    at("q")

        return work

    control = controlled(Preemptions({1: "t-1"}), patience=60.0)
    outcomes = play(control, [deadlock(one, two), deadlock(two, one)], deadline=2.0)
    assert [outcome.state for outcome in outcomes] == ["unfinished"] * 2


def test_a_deadlock_with_a_lock_that_the_harness_knows_is_no_miss() -> None:
    """t-1 has the known lock and waits for t-0's own one; t-0 stands before the known one."""
    known, own = threading.Lock(), threading.Lock()

    def first(at: Callable[..., None]) -> None:
        with own:
            at("p")
            at("lock.wait", "L")
            with known:
                at("q")

    def second(at: Callable[..., None]) -> None:
        at("lock.wait", "L")
        with known:
            at("lock.held", "L")
            at("p")
            with own:
                at("q")

    control = controlled(Preemptions({1: "t-1", 3: "t-0"}), patience=0.5)
    outcomes = play(control, [first, second], deadline=3.0)
    assert [outcome.state for outcome in outcomes] == ["unfinished"] * 2
    assert control.missed() is None
    assert lines(control) == ["t-0 p", "t-1 p", "t-0 blocked"] and control.blocked == ["t-0"]


# -- misses --------------------------------------------------------------------------------------


def test_a_thread_that_arrives_nowhere_is_a_miss_and_sets_all_free() -> None:
    go = threading.Event()

    def busy(at: Callable[..., None]) -> None:
        at("p")
        while not go.is_set():  # it uses the processor, so it is not blocked
            pass

    def stands(at: Callable[..., None]) -> None:
        at("p")
        go.set()

    control = controlled(Preemptions({1: "t-1", 2: "t-0"}), patience=0.5)
    outcomes = play(control, [busy, stands])
    assert [outcome.state for outcome in outcomes] == ["completed"] * 2
    assert control.missed() == "t-1 stood at p for 0.5 s: t-0 did not arrive anywhere"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("t-0 p nth=2", "t-0 has ended"),
        ("t-9 p", "t-9 cannot run here"),
        ("t-0 q\nt-0 p", "t-0 has passed it already"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_missed_and_the_line_named(text, why) -> None:
    control = controlled(Follow(Schedule.parse(f"schedule v1\n{text}\n").lines))
    play(control, [walk, walk])
    missed = control.missed()
    assert missed is not None and why in missed and "of the schedule cannot be followed" in missed


def test_of_two_equal_lines_the_one_is_named_that_cannot_be_followed() -> None:
    follow = Follow([Line("a", "p"), Line("b", "p"), Line("a", "p")])
    follow.choose(Choice(0, None, ("a", "b"), {"a": ("p", 1), "b": ("its start", 1)}))
    standing, counts = {"a": ("q", 1), "b": ("p", 1)}, {("a", "p"): 1, ("b", "p"): 1}
    follow.choose(Choice(1, "b", ("a", "b"), standing, counts))
    assert str(follow.missed()).startswith("line 3 'a p' of the schedule cannot be followed")


def test_a_lenient_replay_leaves_such_lines_out() -> None:
    schedule = Schedule.parse("schedule v1\nt-0 p nth=7\nt-1 p\nt-0 end\n")
    control = controlled(Follow(schedule.lines, lenient=True))
    play(control, [walk, walk])
    assert control.missed() is None
    assert lines(control) == ["t-0 end", "t-1 end"]


def test_a_preemption_of_a_thread_that_cannot_run_is_missed() -> None:
    control = controlled(Preemptions({1: "t-7"}))
    play(control, [walk, walk])
    assert "t-7 cannot run here" in str(control.missed())


def test_a_replay_of_another_program_says_where_the_traces_part() -> None:
    first = controlled(Preemptions({1: "t-1"}))
    play(first, [walk, walk])

    def longer(at: Callable[..., None]) -> None:
        at("p")
        at("p")
        at("q")

    again = from_spec({"strategy": "follow", "schedule": str(first.schedule())})
    play(again, [walk, longer])
    assert again.missed() is None
    assert again.parted() == ("the traces part at point 3, after t-1 p: recorded t-1 q, now t-1 p")
    assert again.record()["controlled"] is False


# -- strategies ----------------------------------------------------------------------------------


def test_priorities_change_who_runs_at_the_points_of_change_only() -> None:
    strategy = Priorities(3, depth=1, length=10)
    picks = {strategy.choose(Choice(n, "a", ("a", "b"))) for n in range(20)}
    assert len(picks) == 1, "depth 1 has no point of change"
    changing = Priorities(3, depth=6, length=10)
    current, switches = "a", 0
    for number in range(11):
        chosen = changing.choose(Choice(number, current, ("a", "b")))
        switches += chosen != current
        current = chosen
    assert switches >= 2


@pytest.mark.parametrize("options", [{"depth": 0}, {"length": 0}])
def test_priorities_refuse_what_cannot_be(options: Mapping[str, int]) -> None:
    with pytest.raises(ValueError, match="count from 1"):
        Priorities(1, **options)


@pytest.mark.parametrize("spec", [{}, {"strategy": "luck"}, {"strategy": "follow", "schedule": ""}])
def test_a_wrong_spec_is_refused(spec: Mapping[str, str]) -> None:
    with pytest.raises(ValueError, match=r"no strategy|no schedule"):
        from_spec(spec)


# -- lines ---------------------------------------------------------------------------------------


def test_lines_of_the_chosen_file_are_points_and_no_others() -> None:
    import subject

    control = Control(Preemptions({1: "t-1"}), points=("subject.py:*",), patience=10.0)

    def arrive(point: str) -> None:
        control.on_event(Event(point, threading.current_thread().name))

    before = threading.gettrace()
    with Lines(control.points, arrive):
        play(control, [lambda at: subject.plain(1), lambda at: subject.twice(1)])
    assert threading.gettrace() is before and sys.gettrace() is None
    trace = control.schedule().trace
    first = subject.plain.__code__.co_firstlineno
    mine = [point for thread, point in trace if thread == "t-0"]
    assert mine == [*(f"subject.py:{first + n}" for n in (2, 3, 5)), "end"]
    assert lines(control)[1] == "t-1 end"


def test_equal_code_in_another_file_is_none_of_the_chosen_lines(tmp_path: Path) -> None:
    functions = []
    for name in ("chosen.py", "another.py"):
        module: dict[str, Callable[[], None]] = {}
        exec(compile("def f():\n    pass\n", str(tmp_path / name), "exec"), module)
        functions.append(module["f"])
    chosen, another = functions
    assert chosen.__code__ == another.__code__, "control"
    for order in ([chosen, another], [another, chosen]):
        seen: list[str] = []
        with Lines(("chosen.py:*",), seen.append):
            for function in order:
                thread = threading.Thread(target=function)
                thread.start()
                thread.join()
        assert seen == ["chosen.py:2"]


def test_without_a_pattern_no_trace_function_is_set() -> None:
    with Lines(("trace.*", "m:f@line:/x.py:3/"), print):
        assert threading.gettrace() is None
