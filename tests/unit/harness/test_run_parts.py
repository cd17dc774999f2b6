"""The parts of `harness run` that work inside the program, one by one and without torch."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable

import pytest

from harness.inject.arrival import Arrival
from harness.inject.perturb import Perturb
from harness.inject.recorder import Recorder
from harness.points import Event

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

    begun = time.monotonic()
    assert ended(*(in_thread(f"t{index}", work) for index in range(3)))
    assert time.monotonic() - begun < DEADLINE  # far below three times the patience
    assert {wait["ended"] for wait in perturb.schedule()["waits"]} == {"nobody else could go on"}


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
