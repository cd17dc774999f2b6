"""The parts of `harness run` that work inside the program, one by one and without torch."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from harness.inject.arrival import Arrival
from harness.inject.hang import HangWatch
from harness.inject.perturb import Perturb
from harness.inject.recorder import Recorder
from harness.points import Event
from harness.run import Request, _Supervisor

DEADLINE = 20


def in_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def ended(*threads: threading.Thread) -> bool:
    for thread in threads:
        thread.join(DEADLINE)
    return not any(thread.is_alive() for thread in threads)


# -- arrival -------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Two modules that nobody has imported, and one that fails at its first import."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "arrival_one.py").write_text("VALUE = 1\n")
    (tmp_path / "arrival_two.py").write_text("import arrival_one\n")
    (tmp_path / "arrival_bad.py").write_text(
        "import sys\nif not hasattr(sys, '_arrival_again'):\n    raise ImportError('not yet')\n"
    )
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before
    for name in ("arrival_one", "arrival_two", "arrival_bad"):
        sys.modules.pop(name, None)


def test_arrival_calls_once_when_all_are_there_and_imports_nothing_itself(modules):
    called = []
    Arrival(["arrival_one", "arrival_two"], lambda: called.append(1)).watch()
    assert "arrival_one" not in sys.modules
    one = importlib.import_module("arrival_one")
    assert one.VALUE == 1 and not called
    assert one.__spec__.loader.get_source("arrival_one") == "VALUE = 1\n"
    importlib.import_module("arrival_two")
    assert called == [1]
    assert not any(isinstance(finder, Arrival) for finder in sys.meta_path)


def test_a_module_whose_import_failed_has_not_arrived(modules, monkeypatch):
    called = []
    Arrival(["arrival_bad"], lambda: called.append(1)).watch()
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("arrival_bad")
    assert not called
    monkeypatch.setattr(sys, "_arrival_again", True, raising=False)
    importlib.import_module("arrival_bad")
    assert called == [1]


def test_what_has_been_imported_already_has_arrived():
    called = []
    Arrival(["json"], lambda: called.append(1)).watch()
    assert called == [1]


# -- recorder ------------------------------------------------------------------------------------


@pytest.fixture
def recorder():
    found = []
    recorder = Recorder(found.append, begun=time.monotonic())
    recorder.found = found
    return recorder


def flag_error() -> RuntimeError:
    """As the wrapper raises it; the frame must be of a file with that name."""
    code = compile(
        "def compile_wrapper():\n    raise RuntimeError('using FX to symbolically trace it')\n",
        "/x/torch/_dynamo/eval_frame.py",
        "exec",
    )
    names: dict = {}
    exec(code, names)
    with pytest.raises(RuntimeError) as caught:
        names["compile_wrapper"]()
    return caught.value


def other_thread(recorder: Recorder, *points: str) -> None:
    """A thread called culprit passes these points and ends."""

    def work() -> None:
        for point in points:
            recorder.on_event(Event(point, "culprit"))

    assert ended(in_thread("culprit", work))


def fail(recorder: Recorder, error: BaseException):
    recorder.on_event(Event("call.enter", "victim"))
    recorder.on_event(Event("call.exit", "victim", error=error))
    return recorder.incidents[-1]


def test_a_thread_inside_a_trace_is_the_culprit_of_the_flags_error(recorder):
    inside, go = threading.Event(), threading.Event()

    def work() -> None:
        recorder.on_event(Event("trace.begin", "culprit"))
        inside.set()
        go.wait(DEADLINE)
        recorder.on_event(Event("trace.left", "culprit"))

    thread = in_thread("culprit", work)
    assert inside.wait(DEADLINE)
    incident = fail(recorder, flag_error())
    go.set()
    assert ended(thread)
    assert incident.culprit is not None and recorder.found == [incident]
    assert (incident.culprit.thread, incident.culprit.how) == ("culprit", "inside")
    assert "work" in [frame.function for frame in incident.culprit.stack]
    told = incident.as_dict()["culprit"]["span"]
    assert told["start"] <= incident.t <= told["end"]


def test_one_that_left_during_the_call_is_told_so(recorder):
    recorder.on_event(Event("call.enter", "victim"))
    other_thread(recorder, "trace.begin", "trace.left")
    recorder.on_event(Event("call.exit", "victim", error=flag_error()))
    (incident,) = recorder.incidents
    assert incident.culprit is not None
    assert incident.culprit.how == "left while the victim was inside"


@pytest.mark.parametrize("error", ["flag", "other"])
def test_a_trace_that_was_over_before_the_call_is_no_culprit(recorder, error):
    """Negative control: without overlap, and without a state that stayed up, nobody is blamed."""
    other_thread(recorder, "trace.begin", "trace.left")
    incident = fail(recorder, flag_error() if error == "flag" else ValueError("own"))
    assert incident.culprit is None and not recorder.found


def test_an_error_that_no_rule_knows_has_no_culprit_whoever_compiles(recorder):
    inside, go = threading.Event(), threading.Event()

    def work() -> None:
        recorder.on_event(Event("trace.begin", "culprit"))
        inside.set()
        go.wait(DEADLINE)

    thread = in_thread("culprit", work)
    assert inside.wait(DEADLINE)
    incident = fail(recorder, ValueError("own"))
    go.set()
    assert ended(thread)
    assert incident.culprit is None
    assert [span.thread for span in incident.others] == ["culprit"]


def test_one_exception_is_one_incident_and_dies_once(recorder):
    error = ValueError("own")
    incident = fail(recorder, error)
    assert not recorder.found
    assert recorder.failed(error, "uncaught") is incident
    assert recorder.failed(error, "uncaught") is incident
    assert recorder.found == [incident] and incident.died
    assert len(recorder.incidents) == 1


def test_a_request_to_stop_is_no_failure(recorder):
    for error in (KeyboardInterrupt(), SystemExit(0), GeneratorExit()):
        recorder.on_event(Event("call.enter", "victim"))
        recorder.on_event(Event("call.exit", "victim", error=error))
    assert not recorder.incidents


def test_memory_is_bounded_however_long_a_program_runs(recorder):
    for _ in range(6000):
        recorder.on_event(Event("call.enter", "victim"))
        recorder.on_event(Event("call.exit", "victim"))
    timeline = recorder.timeline()
    assert recorder.events == 12000
    assert len(timeline["events"]) + timeline["dropped"] == 12000
    assert len(timeline["events"]) <= 4000 and len(timeline["spans"]) <= 1000
    for index in range(200):
        fail(recorder, ValueError(str(index)))
    assert len(recorder.incidents) == 50


def test_a_thread_that_dies_is_found_whatever_the_program_caught_before(recorder):
    for index in range(200):
        fail(recorder, ValueError(str(index)))
    assert not recorder.found
    other_thread(recorder, "trace.begin")  # and is inside still
    incident = recorder.failed(LookupError("the last"), "uncaught")
    assert recorder.found == [incident]
    recorder.on_event(Event("call.enter", "victim"))
    other_thread(recorder, "trace.begin", "trace.left")
    recorder.on_event(Event("call.exit", "victim", error=flag_error()))
    assert [found.culprit is not None for found in recorder.found] == [False, True]


def test_the_bound_of_a_clean_result_counts_threads_that_are_long_gone(recorder):
    number = 600
    for index in range(number):
        thread = in_thread(str(index), lambda: recorder.on_event(Event("call.enter", "")))
        assert ended(thread)
    counts = recorder.counts()
    assert (counts["calls"], counts["threads"]) == (number, number)
    assert len(recorder.threads()) <= 512


def test_a_live_thread_keeps_its_place_however_many_come_and_go(recorder):
    recorder.on_event(Event("call.enter", "main"))
    for _ in range(600):
        other_thread(recorder, "step.begin")
    name = threading.current_thread().name
    assert recorder.inside_idents() == {threading.get_ident(): name}


# -- hang ----------------------------------------------------------------------------------------


class Inside:
    """A recorder that sees one thread inside a call, at one place for ever."""

    events = 0

    def inside_idents(self) -> dict[int, str]:
        return {threading.get_ident(): "drafter-0"}


def looks(watch: HangWatch, number: int) -> None:
    """The watch looks so often, with no time in between."""
    left = iter(range(number))
    watch._stop.wait = lambda _interval: next(left, None) is None
    watch._watch()


@pytest.fixture
def standing(monkeypatch):
    """A thread that stands still, as the frames tell it."""
    frame = sys._getframe()
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): frame})


def test_a_thread_that_does_not_move_for_so_long_is_a_hang(tmp_path, standing):
    hung: list[list[str]] = []
    looks(HangWatch(Inside(), 8.0, str(tmp_path / "beat"), hung.append), 8)
    assert not hung
    looks(HangWatch(Inside(), 8.0, str(tmp_path / "beat"), hung.append), 9)
    assert hung == [["drafter-0"]]


def test_a_program_that_was_stopped_for_an_hour_does_not_hang(tmp_path, standing, monkeypatch):
    """Ctrl-Z, or a laptop that was closed: the clock went on and nobody could move."""
    clock = itertools.count(step=3600)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    hung: list[list[str]] = []
    looks(HangWatch(Inside(), 8.0, str(tmp_path / "beat"), hung.append), 4)
    assert not hung


def test_a_supervisor_that_was_stopped_for_an_hour_ends_nobody(tmp_path, monkeypatch):
    """The beat is old at its first look; only a beat that stays old for all of its looks is."""
    beat, killed = tmp_path / "4711.beat", []
    beat.touch()
    os.utime(beat, (1, 1))
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    supervisor = _Supervisor(Request(["x"], hang=2.0), tmp_path)
    for _ in range(8):
        supervisor._end_the_stuck()
    assert not killed
    beat.touch()
    for _ in range(8):
        supervisor._end_the_stuck()
    assert not killed
    supervisor._end_the_stuck()
    assert killed == [(4711, signal.SIGABRT)] and not beat.exists()


def test_two_live_threads_of_one_name_are_told_apart(recorder):
    go = threading.Event()
    seen = []

    def work() -> None:
        recorder.on_event(Event("call.enter", "same"))
        seen.append(threading.get_ident())
        go.wait(DEADLINE)

    threads = [in_thread("same", work) for _ in range(2)]
    go.set()
    assert ended(*threads)
    # The second one may have come after the first had ended; then the name is free again.
    labels = [row["thread"] for row in recorder.threads()]
    assert labels in (["same", "same (2)"], ["same", "same"])


# -- perturb -------------------------------------------------------------------------------------


def eager(seed: int = 1, patience: float = 15.0) -> Perturb:
    perturb = Perturb(seed, patience=patience)
    perturb.chance = 1.0
    return perturb


def test_a_thread_inside_a_trace_waits_until_another_has_called(monkeypatch):
    perturb = eager()
    order = []
    known, held = threading.Event(), threading.Event()

    def culprit() -> None:
        known.wait(DEADLINE)
        held.set()
        perturb.on_event(Event("trace.body", "culprit"))
        order.append("culprit goes on")

    def victim() -> None:
        perturb.on_event(Event("step.begin", "victim"))
        known.set()
        held.wait(DEADLINE)
        while not any(seat.wants for seat in tuple(perturb._seats.values())):
            pass  # the culprit is about to be held
        order.append("victim calls")
        perturb.on_event(Event("call.settled", "victim"))

    assert ended(in_thread("culprit", culprit), in_thread("victim", victim))
    assert order == ["victim calls", "culprit goes on"]
    (wait,) = perturb.schedule()["waits"]
    assert wait["ended"] == "fulfilled by victim"


def test_who_waits_depends_on_the_seed_and_not_on_the_clock():
    """Without anybody to wait for a wait ends at once, so the asked-for waits can be compared."""

    def asked(seed: int) -> list[tuple[str, int]]:
        perturb = Perturb(seed)
        stranger = threading.Event()
        thread = in_thread("stranger", lambda: stranger.wait(DEADLINE) and None)
        perturb.patience = 0.0
        other = in_thread("other", lambda: perturb.on_event(Event("step.begin", "other")))
        assert ended(other)
        perturb._strangers = lambda: True
        for _ in range(20):
            perturb.on_event(Event("trace.body", "me"))
            perturb.on_event(Event("call.arrive", "me"))
        stranger.set()
        assert ended(thread)
        return [(wait["point"], wait["nth"]) for wait in perturb.schedule()["waits"]]

    assert asked(3) == asked(3)
    assert len({tuple(asked(seed)) for seed in range(5)}) == 5
    assert 0 < len(asked(3)) < 40


def test_alone_nobody_waits():
    perturb = eager()
    perturb._strangers = lambda: False
    perturb.on_event(Event("trace.body", "me"))
    assert perturb.schedule()["waits"] == []


def test_when_all_wait_one_is_let_go_and_when_one_ends_the_others_learn_it():
    perturb = eager()
    perturb._strangers = lambda: False  # pytest has threads of its own
    barrier = threading.Barrier(3)

    def work() -> None:
        name = threading.current_thread().name
        perturb.on_event(Event("step.begin", name))
        barrier.wait(DEADLINE)
        perturb.on_event(Event("call.arrive", name))

    assert ended(*(in_thread(f"t{index}", work) for index in range(3)))
    assert {wait["ended"] for wait in perturb.schedule()["waits"]} == {"nobody else could go on"}


def test_a_forked_child_tells_no_waits_of_its_parent():
    perturb = eager(patience=0.0)
    perturb._strangers = lambda: True
    perturb.on_event(Event("trace.body", "me"))
    assert len(perturb.schedule()["waits"]) == 1
    perturb.reset()
    assert perturb.schedule()["waits"] == []


def test_a_thread_that_waits_for_the_compile_lock_counts_as_blocked():
    """Its owner is held at a point that only the blocked thread could fulfil: it is let go."""
    perturb = eager()
    perturb._strangers = lambda: False
    waiting, stop = threading.Event(), threading.Event()

    def blocked() -> None:
        perturb.on_event(Event("lock.wait", "blocked"))
        waiting.set()
        stop.wait(DEADLINE)

    perturb.on_event(Event("lock.held", "owner"))
    thread = in_thread("blocked", blocked)
    assert waiting.wait(DEADLINE)
    perturb.on_event(Event("trace.body", "owner"))
    stop.set()
    assert ended(thread)
    assert [wait["ended"] for wait in perturb.schedule()["waits"]] == ["nobody else could go on"]
