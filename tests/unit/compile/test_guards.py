"""The guards by name: choosing, explaining, limits, counts, the lock, the serial warm-up."""

from __future__ import annotations

import _thread
import importlib
import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dflash.compile import (
    GUARDS,
    GuardError,
    RecompileError,
    StateError,
    UnsupportedTorch,
    compile_guard,
    supported_range,
)
from dflash.compile.base import CompileGuard
from dflash.compile.guard import ForceCompileGuard, LockGuard, SerialGuard, ThreadLocalGuard
from dflash.compile.own_code import with_own_code
from dflash.compile.states import STATES
from dflash.compile.thread_state import ThreadLocalGlobals

WAIT = 20.0  # seconds; only a failure gets near it
NAMES = ("thread-local", "serial", "lock") + (
    ("force-compile",) if hasattr(torch._dynamo.config, "force_compile_during_fx_trace") else ()
)


def plus(x):
    return x + 1


def in_thread(function):
    """What the function returned, or the exception that it raised, in another thread."""
    result = []

    def run():
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT)
    assert result, "the thread did not end"
    return result[0]


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# -- choosing --------------------------------------------------------------------------------------


def test_import_needs_torch_and_the_standard_library_only():
    """A process whose only third-party package is torch can have the guard."""
    code = (
        "import sys, torch, torch._dynamo, torch.nn.attention.flex_attention\n"
        "before = set(sys.modules)\n"
        "import dflash.compile, dflash.compile.flex_on_cpu, dflash.compile.proof\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - {'torch', 'dflash'} - sys.stdlib_module_names))\n"
        "print(*sorted(n for n in sys.modules if n.startswith('dflash.')))\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    others, own = done.stdout.split("\n")[:2]
    assert others == ""
    assert all(name.startswith("dflash.compile") for name in own.split())


def test_bad_arguments_are_told_in_one_line():
    """An unknown name and a limit that allows nothing."""
    with pytest.raises(GuardError, match=r"^unknown guard 'nolock': use one of auto, .*lock$"):
        compile_guard("nolock")
    for limit in (0, -1):
        with pytest.raises(GuardError, match=rf"^recompile_limit must be at least 1, not {limit}$"):
            compile_guard("lock", recompile_limit=limit)


@pytest.mark.parametrize("version", ["2.8.0", "2.16.0+cu130", "3.0.0a0+git1234"])
def test_unsupported_torch_is_refused_in_one_line(monkeypatch, version):
    """Whatever guard is asked for: on a torch that nobody has tried it says so."""
    monkeypatch.setattr(torch, "__version__", version)
    for name in GUARDS:
        with pytest.raises(UnsupportedTorch) as caught:
            compile_guard(name)
        message = str(caught.value)
        assert version in message and supported_range() in message and "\n" not in message


def test_every_guard_is_available_on_this_torch():
    """None of the tested versions lacks what a guard needs, except torch's own switch."""
    for cls in (ThreadLocalGuard, SerialGuard, LockGuard):
        assert cls.available() is None
    assert (ForceCompileGuard.available() is None) == ("force-compile" in NAMES)


def without(*classes):
    """The guards that ``auto`` finds, with the given ones not to be had."""
    for cls in classes:
        cls.available = classmethod(lambda cls: f"{cls.name} is broken here")
    with compile_guard("auto") as guard:
        return guard.name, guard.explanation


def auto_falls_back():
    if "force-compile" not in NAMES:
        return {"skip": "this torch has no force_compile_during_fx_trace"}
    first = without()
    second = without(ThreadLocalGuard)
    third = without(ForceCompileGuard)
    LockGuard.available = ThreadLocalGuard.available
    try:
        compile_guard("auto")
        message = ""
    except GuardError as error:
        message = str(error)
    return [first, second, third, message]


def test_auto_takes_the_best_that_can_be_had_and_says_why(isolated):
    """thread-local, else force-compile, else lock, else an error; each told in one line."""
    (first, second, third, error) = isolated(auto_falls_back)
    assert [first[0], second[0], third[0]] == ["thread-local", "force-compile", "lock"]
    assert "thread-local is broken here" in second[1]
    assert "thread-local is broken here" in third[1] and "force-compile is broken" in third[1]
    assert "not lock:" in error
    for line in (first[1], second[1], third[1], error):
        assert line and "\n" not in line


def a_state_that_cannot_be_had():
    def check(self):
        raise StateError("no source here")

    ThreadLocalGlobals.check = check
    return [
        cls.available() for cls in (ThreadLocalGuard, ForceCompileGuard, SerialGuard, LockGuard)
    ]


def test_a_guard_is_not_available_without_its_states(isolated):
    """Every guard that needs the thread-local metadata says so beforehand; ``lock`` needs none."""
    *others, lock = isolated(a_state_that_cannot_be_had)
    assert all(others) and lock is None
    assert others[0] == "no source here"


# -- entering and leaving --------------------------------------------------------------------------


TOUCHED = (
    "torch.compiler",
    "torch.fx._symbolic_trace",
    "torch.fx.traceback",
    "torch._higher_order_ops.flex_attention",
)


def torch_state():
    """The identity of everything that a guard touches."""
    config = torch._dynamo.config
    state = {}
    for module in map(importlib.import_module, TOUCHED):
        state[module.__name__] = (id(module.__class__), module.__class__.__name__)
        for name, value in vars(module).items():
            state[f"{module.__name__}.{name}"] = id(value)
            if hasattr(value, "__code__"):
                state[f"{module.__name__}.{name}.__code__"] = id(value.__code__)
    state["trace"] = id(inspect.unwrap(torch.fx.Tracer.trace).__code__)
    for name in ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit"):
        state[name] = getattr(config, name)
    state["force"] = getattr(config, "force_compile_during_fx_trace", None)
    return state


def enter_and_leave(name):
    before = torch_state()
    differences = []
    for limit in (3, 5):  # two guards, one after the other
        with compile_guard(name, recompile_limit=limit) as guard:
            assert "\n" not in guard.explanation
            assert guard.explanation.startswith(name)
            assert torch._dynamo.config.recompile_limit == limit
            function = guard.compile(plus, backend="eager")
            assert function(torch.ones(2)).tolist() == [2, 2]
            inside = torch_state()
        after = torch_state()
        differences.append({k for k in before | after if before.get(k) != after.get(k)})
        assert inside != before
    return [sorted(d) for d in differences]


@pytest.mark.parametrize("name", NAMES)
def test_leaving_restores_everything(isolated, name):
    """Modules, functions' code, values and configuration are the same objects as before."""
    assert isolated(enter_and_leave, name=name) == [[], []]


def enter_fails():
    class Broken(ThreadLocalGuard):
        def _enter(self):
            raise KeyError("in the middle")

    before = torch_state()
    with pytest.raises(KeyError):
        Broken(recompile_limit=2).__enter__()
    after = torch_state()
    with compile_guard("lock"):  # and the next one can be entered
        pass
    return sorted(k for k in before | after if before.get(k) != after.get(k))


def test_a_failed_entry_is_undone(isolated):
    """An error in the middle of the entry leaves nothing installed."""
    assert isolated(enter_fails) == []


def one_at_a_time():
    messages = []
    guard = compile_guard("thread-local", recompile_limit=5)
    function = guard.compile(plus, backend="eager")

    def attempt(action):
        try:
            action()
        except GuardError as error:
            messages.append(str(error))

    attempt(lambda: function(torch.ones(2)))
    with guard:
        attempt(guard.__enter__)
        attempt(compile_guard("lock").__enter__)
        function(torch.ones(2))
        inside = torch._dynamo.config.recompile_limit
    attempt(lambda: function(torch.ones(2)))
    with guard:  # again, afterwards
        function(torch.ones(2))
        guard.prove()
    return [messages, inside, torch._dynamo.config.recompile_limit]


def test_one_guard_is_in_force_at_a_time(isolated):
    """A second entry would be unprotected once the first is left: it is refused.

    So is a call outside the ``with``, which nothing protects.
    """
    messages, inside, after = isolated(one_at_a_time)
    assert [m.split(":")[0] for m in messages] == [
        "the guard 'thread-local' is not in force",
        "the guard 'thread-local' is in force in this process",
        "the guard 'thread-local' is in force in this process",
        "the guard 'thread-local' is not in force",
    ]
    assert (inside, after) == (5, 8)


# -- configuration ---------------------------------------------------------------------------------


def limits_per_thread(name):
    config = torch._dynamo.config
    per_thread = in_thread(lambda: setattr(config, "recompile_limit", 9)) is None
    per_thread = per_thread and config.recompile_limit == 8
    config.recompile_limit = 8
    with compile_guard(name, recompile_limit=3) as guard:
        function = guard.compile(plus, backend="eager")
        guard.warm_up({"main": lambda: function(torch.ones(2))})

        def work():
            before = config.recompile_limit
            with guard.thread():
                inside = config.recompile_limit, config.fail_on_recompile_limit_hit
                with guard.thread():
                    pass
                function(torch.ones(2))
                still = config.recompile_limit
            return before, inside, still, config.recompile_limit

        def on_first_call():
            before = config.recompile_limit
            function(torch.ones(2))
            return before, config.recompile_limit

        return [per_thread, in_thread(work), in_thread(on_first_call)]


@pytest.mark.parametrize("name", NAMES)
def test_the_limit_is_in_force_in_another_thread(isolated, name):
    """In ``thread()``, and from the first call without it; ``thread()`` puts back what was."""
    per_thread, work, on_first_call = isolated(limits_per_thread, name=name)
    before = 8 if per_thread else 3
    assert work == [before, [3, True], 3, before]
    assert on_first_call == [before, 3]


def in_a_context():
    import contextvars

    with compile_guard("thread-local", recompile_limit=3) as guard:
        function = guard.compile(plus, backend="eager")

        def work():
            contextvars.copy_context().run(function, torch.ones(2))
            function(torch.ones(2))
            return torch._dynamo.config.recompile_limit

        return in_thread(work)


def test_the_limit_is_in_force_in_another_context(isolated):
    """torch keeps its configuration per context: what one was told, another does not know."""
    assert isolated(in_a_context) == 3


def over_the_limit(name):
    with compile_guard(name, recompile_limit=2) as guard:
        function = guard.compile(plus, label="limited", backend="eager")

        def work():
            for size in (2, 3, 4):
                function(torch.ones(size))
            return "ran"

        result = work_or_error(work) if name == "serial" else in_thread(work)
        return [type(result).__name__, dict(guard.compiles)]


def work_or_error(work):
    try:
        return work()
    except Exception as error:
        return error


@pytest.mark.parametrize("name", NAMES)
def test_one_compile_over_the_limit_is_an_error(isolated, name):
    """Not a silent fall to eager."""
    assert isolated(over_the_limit, name=name) == ["FailOnRecompileLimitHit", {"limited": 2}]


def many_labels(limit):
    with compile_guard("thread-local", recompile_limit=limit) as guard:
        failures = []

        def work(index):
            try:
                function = guard.compile(plus, label=f"drafter-{index}", backend="eager")
                for size in range(2, 2 + limit):
                    function(torch.ones(size + index))
            except Exception as error:
                failures.append(repr(error))

        crew = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(WAIT)
        return [failures, dict(guard.compiles)]


def test_each_compiled_function_has_its_own_limit(isolated):
    """Twelve drafters with two shapes each: 24 entries of one function, under a limit of 2."""
    failures, compiles = isolated(many_labels, limit=2)
    assert failures == []
    assert compiles == {f"drafter-{index}": 2 for index in range(12)}


def many_modules():
    class Layer(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            return self.linear(x)

    with compile_guard("thread-local", recompile_limit=2) as guard:
        seen = []
        for index in range(3):
            layer = Layer(index + 2)
            layer.register_forward_hook(lambda *_: seen.append(1))
            function = guard.compile(layer, label=f"layer-{index}", backend="aot_eager")
            for rows in (2, 3):
                function(torch.ones(rows, index + 2)).sum().backward()
            assert layer.linear.weight.grad is not None
        partial = guard.compile(layer.forward, label="method", backend="eager")
        assert torch.equal(partial(torch.ones(2, 4)), layer(torch.ones(2, 4)))
        return [dict(guard.compiles)]


def test_modules_of_one_class_do_not_share_a_limit(isolated):
    """They share the code of ``forward``; a module, like a method, is called by code of its own."""
    (compiles,) = isolated(many_modules)
    assert compiles == {**{f"layer-{i}": 2 for i in range(3)}, "method": 1}


def called_from_compiled_code(name):
    with compile_guard(name) as guard:
        inner = guard.compile(lambda x: x * 2, label="inner", backend="eager")

        def outer(x):
            return inner(x) + 1

        function = guard.compile(outer, label="outer", backend="eager", fullgraph=True)
        return [function(torch.ones(2)).tolist(), dict(guard.compiles)]


@pytest.mark.parametrize("name", NAMES)
def test_a_guarded_call_is_inlined_into_compiled_code(isolated, name):
    """One graph, no break: dynamo sees the function and none of the guard."""
    assert isolated(called_from_compiled_code, name=name) == [[3, 3], {"outer": 1}]


# -- a function's own code -------------------------------------------------------------------------


def test_own_code_is_the_same_function():
    """Defaults, keyword defaults, closure, annotations, attributes; another code object."""
    step = 3

    def function(a, b=2, *, c: int = 5):
        """Adds."""
        return a + b + c + step

    function.mark = "kept"
    copy = with_own_code(function, "drafter-0")
    assert copy(1) == function(1) == 11
    assert copy(1, 1, c=1) == 6
    assert copy.__code__ is not function.__code__
    assert copy.__closure__ == function.__closure__
    assert (copy.__name__, copy.__doc__, copy.mark) == ("function", "Adds.", "kept")
    copy.__kwdefaults__["c"] = 0
    assert function(1) == 11, "the copy's defaults are its own"


def test_own_code_differs_for_equal_labels():
    """Labels name counts; two functions with one label still have two caches."""
    first, second = with_own_code(plus, "a"), with_own_code(plus, "a")
    assert first.__code__ is not second.__code__


def test_own_code_of_a_compiled_function_is_that_of_the_function():
    """As torch.compile does: the wrapper is taken off, not copied."""
    compiled = torch.compile(plus, backend="eager")
    assert with_own_code(compiled, "x").__code__.co_filename == plus.__code__.co_filename


def test_own_code_of_a_callable_forwards():
    """Modules and bound methods keep what they are; the code that calls them is new."""
    module = torch.nn.Linear(2, 2)
    copies = [with_own_code(module, "a"), with_own_code(module, "a"), with_own_code("x".join, "b")]
    assert torch.equal(copies[0](torch.ones(2)), module(torch.ones(2)))
    assert copies[2]("ab") == "axb"
    assert len({id(copy.__code__) for copy in copies}) == 3


# -- lock ------------------------------------------------------------------------------------------


class Watched:
    """The guard's lock, which tells when somebody has to wait."""

    def __init__(self):
        self.real, self.waiting = threading.RLock(), threading.Event()

    def __enter__(self):
        if not self.real.acquire(blocking=False):
            self.waiting.set()
            self.real.acquire()

    def __exit__(self, *_):
        self.real.release()


def two_threads_and_a_lock(first):
    """One thread inside (a call or a region), another one calls; what happened, in order."""
    with compile_guard("lock") as guard:
        guard.lock = Watched()
        order = []
        inside, go_on = threading.Event(), threading.Event()

        def parked(graph, _inputs):
            order.append("first in")
            inside.set()
            assert go_on.wait(WAIT)
            order.append("first out")
            return graph.forward

        warm = guard.compile(lambda x: x * 2, label="warm", backend="eager")
        warm(torch.ones(2))
        slow = guard.compile(plus, label="slow", backend=parked)

        def enter():
            if first == "call":
                slow(torch.ones(2))
            else:
                with guard.region():
                    parked(torch.fx.GraphModule({}, torch.fx.Graph()), None)

        def second():
            warm(torch.ones(2))
            order.append("second in")

        threads = [threading.Thread(target=enter), threading.Thread(target=second)]
        threads[0].start()
        assert inside.wait(WAIT)
        threads[1].start()
        waited = guard.lock.waiting.wait(WAIT)
        go_on.set()
        for thread in threads:
            thread.join(WAIT)
        return [waited, order]


@pytest.mark.parametrize("first", ["call", "region"])
def test_lock_lets_one_thread_in_at_a_time(isolated, first):
    """Who comes while another one compiles, or is in its backward, waits until that is over."""
    assert isolated(two_threads_and_a_lock, first=first) == [
        True,
        ["first in", "first out", "second in"],
    ]


def engine_thread(in_region):
    """A thread that Python did not start calls while this thread holds the lock."""
    with compile_guard("lock", recompile_limit=4) as guard:
        guard.lock = Watched()
        warm = guard.compile(plus, label="warm", backend="eager")
        warm(torch.ones(2))
        done, seen = threading.Event(), []

        def recompute():
            seen.append(warm(torch.ones(2)).tolist())
            seen.append(torch._dynamo.config.recompile_limit)
            done.set()

        with guard.region() if in_region else guard.lock:
            _thread.start_new_thread(recompute, ())
            ended = done if in_region else guard.lock.waiting
            passed = ended.wait(WAIT)
            inside = list(seen)
        assert done.wait(WAIT)
        with pytest.raises(KeyError), guard.region():
            raise KeyError
        return [passed, inside, guard._in_backward]


def test_lock_lets_the_engine_recompute_for_its_owner(isolated):
    """A recompute in a CUDA backward comes from an engine thread, while the owner waits for it.

    Outside a region the lock is somebody's call, which has nothing to do with the engine: it waits.
    """
    assert isolated(engine_thread, in_region=True) == [True, [[2, 2], 4], False]
    assert isolated(engine_thread, in_region=False) == [True, [], False]


# -- serial ----------------------------------------------------------------------------------------


def serial():
    with compile_guard("serial") as guard:
        function = guard.compile(plus, label="f", backend="eager")
        other = guard.compile(lambda x: x * 2, label="g", backend="eager")
        cold = in_thread(lambda: function(torch.ones(2)))
        counted = guard.warm_up(
            {
                "f": lambda: [function(torch.ones(n)) for n in (2, 3)],
                "g": lambda: other(torch.ones(2)),
            }
        )
        warm = in_thread(lambda: function(torch.ones(2)).tolist())
        new = [
            in_thread(lambda: function(torch.ones(9))),
            work_or_error(lambda: other(torch.ones(4))),
        ]
        again = in_thread(lambda: function(torch.ones(3)).tolist())
        return [
            [type(cold).__name__, str(cold)],
            counted,
            warm,
            [[type(e).__name__ for e in chain(error)] for error in new],
            next(str(e) for e in chain(new[0]) if isinstance(e, RecompileError)),
            again,
        ]


def test_serial_compiles_in_the_warm_up_and_nowhere_else(isolated):
    """Before it a thread is refused, in it compiles are counted, after it one is an error."""
    cold, counted, warm, new, message, again = isolated(serial)
    assert cold[0] == "GuardError" and "warm_up() before the threads start" in cold[1]
    assert counted == {"f": 2, "g": 1}
    assert (warm, again) == ([2, 2], [2, 2, 2])
    assert all("RecompileError" in names for names in new)
    assert message.startswith("f compiles after the warm-up")


def serial_beside():
    """Entered and warmed up away from the main thread; a recompute on an engine thread in it."""
    from torch.utils.checkpoint import checkpoint  # noqa: F401  (what makes such recomputes)

    with compile_guard("serial") as guard:
        function = guard.compile(plus, label="f", backend="eager")
        results = []

        def engine():
            done = threading.Event()

            def recompute():
                results.append(work_or_error(lambda: function(torch.ones(2)).tolist()))
                done.set()

            _thread.start_new_thread(recompute, ())
            assert done.wait(WAIT)

        engine()
        in_thread(lambda: guard.warm_up({"f": lambda: (function(torch.ones(2)), engine())}))
        engine()
        return [type(results[0]).__name__, results[1:], dict(guard.compiles)]


def test_serial_warm_up_may_run_anywhere_and_recompute(isolated):
    """The thread that warms up need not be the main one, and its backward may use the engine."""
    assert isolated(serial_beside) == ["GuardError", [[2, 2], [2, 2]], {"f": 1}]


def serial_fails():
    with compile_guard("serial") as guard:
        function = guard.compile(plus, label="f", backend="eager")

        def broken():
            raise KeyError("a shape")

        with pytest.raises(KeyError):
            guard.warm_up({"broken": broken})
        counts = guard.warm_up({"f": lambda: function(torch.ones(2))})
    with guard:  # entered again: not warmed up yet
        return [counts, guard.warm_up({"f": lambda: function(torch.ones(5))})]


def test_serial_is_not_sealed_by_a_warm_up_that_failed(isolated):
    """Nor by that of an earlier entry."""
    assert isolated(serial_fails) == [{"f": 1}, {"f": 1}]


# -- what holds for all ----------------------------------------------------------------------------


def intercepts(name):
    """A compiled call beside another thread's trace: counted once per call."""
    with compile_guard(name) as guard:
        function = guard.compile(plus, backend="eager")
        function(torch.ones(2))
        guard.prove()
        before = guard.intercepted
        inside, go_on = threading.Event(), threading.Event()

        def traced(x):
            inside.set()
            go_on.wait(WAIT)
            return x

        thread = threading.Thread(target=lambda: torch.fx.Tracer().trace(traced))
        thread.start()
        assert inside.wait(WAIT)
        for _ in range(3):
            function(torch.ones(2))
        beside = guard.intercepted
        go_on.set()
        thread.join(WAIT)
        function(torch.ones(2))
        return [before, beside, guard.intercepted, dict(guard.compiles)]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("serial", "lock")])
def test_intercepted_counts_calls_in_danger(isolated, name):
    """Calls while another thread traces, those alone; the proof leaves nothing in the counts."""
    if hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_tls"):
        pytest.skip("this torch keeps the flag per thread: there is no danger to count")
    assert isolated(intercepts, name=name) == [0, 3, 3, {"plus": 1}]


def test_the_table_of_states_and_the_guards_agree():
    """What a guard needs is a row; the first guard needs them all."""
    rows = {row.name for row in STATES}
    assert len(rows) == len(STATES)
    for cls in CompileGuard.__subclasses__():
        assert set(cls.needs) <= rows
    assert set(ThreadLocalGuard.needs) == rows
