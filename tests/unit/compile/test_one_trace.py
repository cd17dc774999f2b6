"""A foreign FX trace beside a compile: what it does to torch, and that every guard prevents it.

Orders are forced at the harness's points, so each race happens every time, and each guarded case
shows that the trace really came while the other thread was inside its own.
"""

from __future__ import annotations

import importlib
import threading

import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
import torch.fx._symbolic_trace as symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.compile import StateError, compile_guard
from dflash.compile.one_trace import OneTraceAtATime
from dflash.compile.states import STATES
from harness import Script, Trial, Verdict
from harness.control import Control
from harness.replay import Schedule
from harness.strategies import Follow
from harness.verdict import judge

WAIT = 20.0  # seconds; only a failure gets near it
GUARDS = ("thread-local", "serial", "lock") + (
    ("force-compile",) if hasattr(torch._dynamo.config, "force_compile_during_fx_trace") else ()
)
HIDES_THE_FLAG = hasattr(torch.compiler, "_compile_session_context")  # since 2.13
THREAD_LOCAL_FLAG = hasattr(symbolic_trace, "_is_fx_tracing_tls")  # since 2.14
# Both end in a stuck nn.Module, the first one with an error as well.
CROSSWISE = (
    "thread-0 trace.body",
    "thread-1 trace.body",
    "thread-0 end",
    "thread-1 end",
)
SILENT = (
    "thread-0 patch.enter",
    "thread-1 trace.body",
    "thread-0 trace.body",
    "thread-1 end",
    "thread-0 end",
)
# thread-1 asks for dynamo's lock while thread-0 is inside a trace of its compile.
IN_TURN = ("thread-0 trace.body", "thread-1 lock.wait", "thread-0 trace.end", "thread-1 trace.body")


def trace():
    return make_fx(lambda x: x.sin())(torch.ones(2))


def double_sine(x):
    return x.sin() * 2


def survive_cuda_build_without_gpu():
    """A control shall die of what it is about; the guards have a row for this crash."""
    ensure = hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    if ensure and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def run_both(trial, compiled):
    """thread-0 compiles and steps, thread-1 traces; under the trial's order."""

    def work(member):
        if member.index:
            return trace() and None
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
        return None

    trial.run(2, work, start="together", name="thread")


def result_of(trial):
    record = trial.record()
    stuck = [row["probe"] for row in record["probes"] if row["at_rest"] is False]
    return [str(judge(record)), stuck, record["script"]["missed"], record["canaries"]]


def unguarded(lines):
    survive_cuda_build_without_gpu()
    schedule = Schedule.parse("\n".join(("schedule v1", *lines)))
    with Trial(control=Control(Follow(schedule.lines))) as trial:
        run_both(trial, torch.compile(double_sine, backend="aot_eager"))
    return result_of(trial)


@pytest.mark.parametrize("lines", [CROSSWISE, SILENT], ids=["raised", "silent"])
def test_without_a_guard_torch_is_damaged(isolated, lines):
    """``nn.Module`` stays patched, whether or not a thread raised.

    Later compiles of a module capture nothing (not on 2.13, where only the patch stays).
    """
    verdict, stuck, missed, canaries = isolated(unguarded, lines=lines)
    assert missed is None
    assert "module-call" in stuck
    if lines is CROSSWISE:
        assert verdict == Verdict.RAISED and canaries["fresh-compile"]
    elif HIDES_THE_FLAG and not THREAD_LOCAL_FLAG:
        assert verdict == Verdict.STICKY_STATE
    else:
        assert verdict == Verdict.SILENTLY_EAGER
        assert "captured 0 graphs" in canaries["fresh-compile"]


def guarded(name):
    script = Script(IN_TURN, patience=WAIT)
    with Trial(script=script) as trial, compile_guard(name) as guard:
        function = guard.compile(double_sine, backend="aot_eager")
        # Through the warm-up, since the guard ``serial`` compiles nowhere else.
        run_both(trial, lambda x: warm_up(guard, function, x))
    return result_of(trial)


def warm_up(guard, function, x):
    result = []
    guard.warm_up({"once": lambda: result.append(function(x))})
    return result[0]


@pytest.mark.parametrize("name", GUARDS)
def test_behind_a_guard_the_trace_waits(isolated, name):
    """It arrives while the other thread traces, and begins when that has ended."""
    verdict, stuck, missed, canaries = isolated(guarded, name=name)
    assert missed is None
    assert (verdict, stuck) == (Verdict.COMPLETED, [])
    assert canaries and not any(canaries.values())


class _Parking:
    """Dynamo's lock; a thread called ``compiler`` stops before it takes it until it may go on."""

    def __init__(self):
        self.lock = convert_frame.compile_lock
        self.there, self.go_on = threading.Event(), threading.Event()

    def acquire(self, *args, **kwargs):
        if threading.current_thread().name == "compiler":
            self.there.set()
            self.go_on.wait(WAIT)
        return self.lock.acquire(*args, **kwargs)

    def release(self):
        self.lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


def nested_trace_beside_a_compile():
    """The tracer holds dynamo's lock and calls the function; the other holds the guard's lock."""
    lock = convert_frame.compile_lock = _Parking()
    results = {}
    with compile_guard("lock") as guard:
        function = guard.compile(double_sine, backend="eager")

        def traced(x):
            lock.go_on.set()
            return function(x)

        def run(name, work):
            try:
                results[name] = str(work())
            except Exception as error:
                results[name] = str(error)

        works = {
            "compiler": lambda: function(torch.ones(2)).shape,
            "tracer": lambda: lock.there.wait(WAIT) and torch.fx.Tracer().trace(traced),
        }
        threads = [
            threading.Thread(target=run, args=pair, name=pair[0], daemon=True)
            for pair in works.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    return results


def test_a_nested_trace_is_refused_and_not_a_deadlock(isolated):
    """Behind ``lock``, which has a lock of its own beside dynamo's."""
    results = isolated(nested_trace_beside_a_compile)
    assert results.keys() == {"compiler", "tracer"}, "one of them has not ended"
    assert "symbolically trace" in results["tracer"]
    assert results["compiler"] == "torch.Size([2])"


def trace_with_patience(patience):
    held, go_on, errors = threading.Event(), threading.Event(), []

    def hold():
        with convert_frame.compile_lock:
            held.set()
            go_on.wait(WAIT)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(WAIT)
    patch = OneTraceAtATime(patience)
    patch.install()
    for _ in range(2):
        try:
            errors.append(str(trace()))
        except StateError as error:
            errors.append(str(error))
        go_on.set()
        thread.join(WAIT)
    patch.remove()
    return errors


def test_a_trace_does_not_wait_for_ever(isolated):
    """It says in one line what it waited for; with the lock given back it goes on."""
    first, second = isolated(trace_with_patience, patience=0.05)
    assert first.startswith("an FX trace in MainThread has waited 0.05 s") and "\n" not in first
    assert second.startswith("GraphModule") or "forward" in second


def torch_without_the_place():
    proxy_tensor = importlib.import_module("torch.fx.experimental.proxy_tensor")
    tracer = proxy_tensor._MakefxTracer
    del tracer._trace_inner
    before = torch.fx.Tracer.trace
    try:
        OneTraceAtATime().install()
    except StateError as error:
        return [str(error), torch.fx.Tracer.trace is before]
    return ["", False]


def test_a_torch_without_the_place_is_refused_before_anything_is_done(isolated):
    """Half of the places would protect nothing."""
    said, untouched = isolated(torch_without_the_place)
    assert said.startswith("torch ") and "_MakefxTracer._trace_inner" in said
    assert untouched


def test_every_guard_says_that_traces_wait():
    """In its one line of explanation."""
    (row,) = [row for row in STATES if row.name == "fx-patches"]
    for name in GUARDS:
        with compile_guard(name) as guard:
            assert row.instead in guard.explanation
