"""Each probe sees its state when it is up, each canary falls when it must, and the watch blames."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx._symbolic_trace as st
import torch.fx.traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness import probes
from harness.hooks import Hooks
from harness.isolate import Isolation
from harness.points import Event
from harness.probes import (
    CATALOGUE,
    UNKNOWN,
    Probe,
    audit,
    by_name,
    read,
    rest_values,
    run_canaries,
)
from harness.unfix import unfix
from harness.watch import Watch

# -- the states, set by hand in a process of their own -------------------------------------------


def _look_alike(method: Callable[..., Any]) -> Callable[..., Any]:
    """What FX leaves behind: right by name, wrong by identity."""

    @functools.wraps(method)
    def module_call_wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return module_call_wrapper


def _fx_flag() -> None:
    if hasattr(st, "_is_fx_tracing_flag"):
        st._is_fx_tracing_flag = True
    else:
        st._set_is_fx_tracing(True)


def _patch_call() -> None:
    torch.nn.Module.__call__ = _look_alike(torch.nn.Module.__call__)


def _patch_getattr() -> None:
    torch.nn.Module.__getattr__ = _look_alike(torch.nn.Module.__getattr__)


def _config(module: str, name: str) -> Callable[[], object]:
    """A setting, changed in the thread that calls."""

    def change() -> None:
        settings = importlib.import_module(module)
        setattr(settings, name, _other(getattr(settings, name)))

    return change


def _eager_flex() -> None:
    from torch.nn.attention import flex_attention as flex

    flex._WARNINGS_SHOWN.add("flex_attention called without torch.compile()")


def _hold_compile_lock() -> None:
    from torch._dynamo import convert_frame

    convert_frame.compile_lock.acquire()


def _metrics() -> None:
    from torch._dynamo import utils

    utils.get_metrics_context().__enter__()


def _tracing_context() -> None:
    from torch._guards import TracingContext, tracing

    KEPT.append(tracing(TracingContext(None)))
    KEPT[-1].__enter__()


def _pending() -> None:
    from torch._dynamo.callback import callback_handler

    callback_handler._CompilationCallbackHandler__pending_callbacks_counter = 1


def _lowering() -> None:
    from torch._inductor.virtualized import V

    KEPT.append(V.set_graph_handler(object()))
    KEPT[-1].__enter__()


def _compile_flex() -> None:
    from torch.nn.attention import flex_attention as flex

    q = torch.ones(1, 1, 16, 16)
    torch.compile(flex.flex_attention, backend="eager")(q, q, q)


def _mode(kind: type) -> Callable[[], object]:
    def enter() -> None:
        KEPT.append(kind())
        KEPT[-1].__enter__()

    return enter


def _thread_local(module: str, holder: str, name: str) -> Callable[[], object]:
    return lambda: setattr(getattr(importlib.import_module(module), holder), name, True)


def _stash(name: str) -> Callable[[], object]:
    return lambda: os.environ.update({name: "/elsewhere"})


def _hold_capture_lock() -> None:
    from torch._inductor import cudagraph_trees

    cudagraph_trees.graph_capture_lock.acquire()


def _functorch_level() -> None:
    torch._C._functorch._vmap_increment_nesting(2, "error")


C_FLAGS = torch._C._dynamo.eval_frame
KEPT: list[Any] = []  # what must not be finalised, or it would put its state back

# States with a reader of their own. All others are an attribute, which `_set_attribute` changes.
DIRT: dict[str, Callable[[], object]] = {
    "fx-tracing-flag": _fx_flag,
    "fx-patcher": lambda: setattr(st, "CURRENT_PATCHER", st._Patcher()),
    "module-call": _patch_call,
    "module-getattr": _patch_getattr,
    "stance": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "traceback-meta": lambda: fx_traceback.current_meta.update(custom={}),
    "make-fx-tracer": lambda: setattr(proxy_tensor, "_CURRENT_MAKE_FX_TRACER", object()),
    "original-aten": lambda: proxy_tensor.ORIGINAL_ATEN.set(object()),
    "region-id": lambda: C_FLAGS.set_eval_frame_isolate_recompiles_id(7),
    "skip-guards": lambda: C_FLAGS.set_skip_guard_eval_unsafe(True),
    "fullgraph-frames": lambda: C_FLAGS.set_fullgraph_compiled_frame_count(0),
    "fullgraph-nested": lambda: C_FLAGS.set_fullgraph_error_on_nested_compile(True),
    "compile-lock": _hold_compile_lock,
    "pending-callbacks": _pending,
    "metrics-context": _metrics,
    "tracing-context": _tracing_context,
    "hop-compile": _thread_local(
        "torch._higher_order_ops.utils", "_hop_compile_tls", "in_hop_compile"
    ),
    "dynamo-config": _config("torch._dynamo.config", "recompile_limit"),
    "inductor-config": _config("torch._inductor.config", "fx_graph_cache"),
    "functorch-config": _config("torch._functorch.config", "donated_buffer"),
    "fake-override": _thread_local(
        "torch._subclasses.fake_tensor", "fake_tensor_tls", "allow_non_fake_inputs_override"
    ),
    "functorch-stack": _functorch_level,
    "dispatch-stack": _mode(TorchDispatchMode),
    "function-stack": _mode(BaseTorchFunctionMode),
    "grad-mode": lambda: torch.set_grad_enabled(False),
    "default-device": lambda: torch.set_default_device("meta"),
    "eager-flex-warning": _eager_flex,
    "flex-cache": _compile_flex,
    "inductor-graph": _lowering,
    "cudagraph-trees": _thread_local(
        "torch._inductor.cudagraph_trees", "local", "tree_manager_containers"
    ),
    "cudagraph-capture": _hold_capture_lock,
    "triton-cache-dir": _stash("TRITON_CACHE_DIR"),
    "inductor-cache-dir": _stash("TORCHINDUCTOR_CACHE_DIR"),
    "dynamo-counters": lambda: torch._dynamo.utils.counters["frames"].update(total=1),
}
# What comes with a state, because torch keeps the same thing in two places.
TOGETHER = {
    "default-device": {"function-stack"},
    "dispatch-stack": {"dispatch-mode", "dispatch-mode-outside", "dispatch-mode-compiled"},
}


def _other(value: Any) -> Any:
    """Something of the same kind that is not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, dict | list | set) or hasattr(value, "__len__"):
        return [*value, "one more"]
    if callable(value) and not hasattr(value, "__next__"):
        return _look_alike(value)
    return "something"


def dirtied_in_turn() -> dict[str, Any]:
    """Runs in its own process: changes one plain attribute after the other and puts it back."""
    probes.load_all()
    rest = rest_values()
    found = {}
    for probe in CATALOGUE:
        if probe.name in DIRT or rest[probe.name] is UNKNOWN:
            continue
        owner: Any = importlib.import_module(probe.module)
        *path, last = probe.where.removeprefix(f"{probe.module}.").split(".")
        for name in path:
            owner = getattr(owner, name)
        old = getattr(owner, last)
        setattr(owner, last, _other(old))
        found[probe.name] = audit(rest)
        setattr(owner, last, old)
    return {
        name: {key: [row["probe"] for row in rows if row[key] is wanted] for key, wanted in KEYS}
        for name, rows in found.items()
    }


KEYS = (("changed", True), ("at_rest", False))


def dirtied(*, name: str | None, load: bool = True) -> dict[str, Any]:
    """Runs in its own process: sets one state by hand and audits it from another thread."""
    if load:
        probes.load_all()
    rest = rest_values()
    if name is not None and rest[name] is not UNKNOWN:
        DIRT[name]()
    found: dict[str, list[str]] = {}

    def look(where: str) -> None:
        rows = audit(rest)
        found[where] = [row["probe"] for row in rows if row["at_rest"] is False]
        found[f"changed {where}"] = [row["probe"] for row in rows if row["changed"]]

    look("here")
    other = threading.Thread(target=look, args=("other thread",))
    other.start()
    other.join()
    return found | {"unknown": [row.name for row in CATALOGUE if rest[row.name] is UNKNOWN]}


def canaries_after(*, damage: str) -> dict[str, str | None]:
    """Runs in its own process: breaks something, then runs the canaries."""
    if damage == "module-call-raises":

        def module_call_wrapper(*_: Any, **__: Any) -> Any:
            raise NameError("module is not installed as a submodule")

        torch.nn.Module.__call__ = module_call_wrapper
    elif damage == "wrong-number":
        torch.nn.Linear.forward = lambda self, x: x * 3
    elif damage == "force-eager":
        torch.compiler.set_stance("force_eager")
    elif damage == "fx-flag":
        _fx_flag()
    return run_canaries()


@pytest.mark.parametrize("name", DIRT)
def test_a_state_set_by_hand_is_reported_and_nothing_else_is(
    isolation: Isolation, name: str
) -> None:
    result = isolation.run(dirtied, {"name": name}, deadline=60)
    assert result.ended == "returned", result.error
    if name in result.value["unknown"]:
        assert not by_name(name).promised(torch.__version__), "promised, and cannot be read"
        pytest.skip(f"torch {torch.__version__} has no {name}: its row says so")
    assert name in result.value["changed here"]
    wanted = {name} | TOGETHER.get(name, set())
    assert set(result.value["here"]) == {name for name in wanted if by_name(name).judged}


def test_every_other_state_is_reported_when_its_attribute_is_changed(isolation: Isolation) -> None:
    result = isolation.run(dirtied_in_turn, deadline=100)
    assert result.ended == "returned", result.error
    here = {probe.name for probe in CATALOGUE if probe.promised(torch.__version__)}
    assert here <= result.value.keys() | DIRT.keys()
    for name, found in result.value.items():
        assert found["changed"] == [name]
        assert found["at_rest"] == ([name] if by_name(name).judged else [])


def mode_left(*, unfix_first: bool) -> list[str]:
    """Runs in its own process: a dispatch mode is left set, and judged or only shown."""
    if unfix_first:
        unfix(["dispatch-mode-stack"])
    rest = rest_values()
    _set = importlib.import_module("torch.utils._python_dispatch")
    _set._is_in_torch_dispatch_mode = True
    rows = {row["probe"]: row for row in audit(rest)}
    assert rows["dispatch-mode"]["changed"]
    return [name for name, row in rows.items() if row["at_rest"] is False]


def test_a_flag_that_this_torch_does_not_ask_is_shown_and_not_judged(isolation: Isolation) -> None:
    """The flag sticks on every version; it harms where dynamo decides by it."""
    asked = by_name("dispatch-mode").judged
    left = isolation.run(mode_left, {"unfix_first": False}, deadline=60).value
    assert left == (["dispatch-mode"] if asked else [])
    left = isolation.run(mode_left, {"unfix_first": True}, deadline=60).value
    assert left == ["dispatch-mode"]


def test_the_scope_of_a_probe_says_whether_another_thread_sees_it(isolation: Isolation) -> None:
    """pytorch#186537: dynamo's configuration belongs to the thread since 2.12."""
    process_wide = isolation.run(dirtied, {"name": "module-call"}, deadline=60).value
    per_thread = isolation.run(dirtied, {"name": "dynamo-config"}, deadline=60).value
    assert process_wide["other thread"] == ["module-call"]
    assert per_thread["other thread"] == []


def test_names_are_unique_and_every_reader_of_its_own_has_its_dirt() -> None:
    names = [probe.name for probe in CATALOGUE]
    assert len(set(names)) == len(names)
    assert DIRT.keys() <= set(names)


def test_after_the_import_everything_is_at_rest_or_unknown(isolation: Isolation) -> None:
    for load in (False, True):
        result = isolation.run(dirtied, {"name": None, "load": load}, deadline=60)
        assert result.value["here"] == result.value["other thread"] == []
        assert not [
            name for name in result.value["unknown"] if by_name(name).promised(torch.__version__)
        ]


def compiled_alone(*, load: bool) -> dict[str, Any]:
    """Runs in its own process: one compile with a backward, from nothing loaded or everything."""
    if load:
        probes.load_all()
    rest = rest_values()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (x * 2).sin().sum(), backend="aot_eager")(x).backward()
    rows = audit(rest)
    return {
        "left": [row["probe"] for row in rows if row["at_rest"] is False],
        "grown": [row["probe"] for row in rows if row["changed"] and row["grows"]],
    }


@pytest.mark.parametrize("load", [True, False])
def test_a_plain_compile_leaves_everything_at_rest(isolation: Isolation, load: bool) -> None:
    """A row that one thread alone cannot keep at rest would make every trial a finding."""
    result = isolation.run(compiled_alone, {"load": load}, deadline=60)
    assert result.ended == "returned", result.error
    assert result.value["left"] == []
    assert {"frame-counter", "op-count"} <= set(result.value["grown"])


def test_a_probe_that_cannot_be_read_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> object:
        raise TypeError("renamed next year")

    promised = Probe("renamed", "somewhere", gone, probes.PROCESS, "-")
    older = Probe("older", "somewhere", gone, probes.PROCESS, "-", versions="to 2.0")
    for probe in (promised, promised, older):
        assert read(probe) is UNKNOWN
    (line,) = [record.getMessage() for record in caplog.records]
    assert "probe renamed (somewhere) cannot be read" in line
    assert "renamed next year" in line


@pytest.mark.parametrize(
    ("versions", "torch_version", "promised"),
    [
        ("all", "3.0.0", True),
        ("2.13+", "2.9.1+cpu", False),
        ("2.13+", "2.13.0", True),
        ("2.13+", "2.14.1", True),
        ("to 2.12", "2.12.9", True),
        ("to 2.12", "2.13.0", False),
    ],
)
def test_versions_are_compared_by_number(versions: str, torch_version: str, promised: bool) -> None:
    probe = Probe("x", "x", lambda: None, probes.PROCESS, "-", versions=versions)
    assert probe.promised(torch_version) is promised


def test_a_module_that_nobody_loaded_is_not_loaded_by_looking() -> None:
    probe = Probe(
        "lazy", "never.here", lambda: 1 / 0, probes.PROCESS, "-", module="never.here", rest=0
    )
    assert read(probe) is probes.NOT_LOADED
    rest = {"lazy": probes.NOT_LOADED}
    assert probes.at_rest(probe, probes.NOT_LOADED, rest) is True
    assert probes.at_rest(probe, 0, rest) is True  # loaded since, and at its declared rest
    assert probes.at_rest(probe, 1, rest) is False
    undeclared = Probe("lazy", "x", lambda: 1, probes.PROCESS, "-", module="x")
    assert probes.at_rest(undeclared, 1, rest) is None


def test_unknown_is_neither_at_rest_nor_a_finding() -> None:
    def gone() -> object:
        raise AttributeError("torch of the year after next")

    probe = Probe("gone", "nowhere", gone, probes.PROCESS, "-")
    assert read(probe) is UNKNOWN
    rest = rest_values((probe,))
    assert [row["at_rest"] for row in audit(rest, (probe,))] == [None]
    assert probes.at_rest(probe, 3, rest) is None
    assert probes.at_rest(probe, UNKNOWN, {"gone": 3}) is None


def test_a_look_alike_is_told_by_identity_and_shown_by_its_code() -> None:
    """``functools.wraps`` makes the qualified name right; the code object tells the truth."""
    probe = next(probe for probe in CATALOGUE if probe.name == "module-call")
    rest = rest_values((probe,))
    fake = _look_alike(rest["module-call"])
    assert fake.__qualname__ == rest["module-call"].__qualname__
    assert probes.at_rest(probe, fake, rest) is False
    assert "_look_alike.<locals>.module_call_wrapper" in probes.show(fake)
    assert probes.at_rest(probe, rest["module-call"], rest) is True


def test_a_value_is_shown_short_and_whatever_its_repr_does() -> None:
    class Wild:
        def __repr__(self) -> str:
            raise RuntimeError("a fake tensor outside its mode")

    assert probes.show(Wild()) == "<repr raised RuntimeError>"
    assert len(probes.show("x" * 10_000)) == 200
    assert probes.show(None) == "None"


@pytest.mark.parametrize(
    ("damage", "fallen", "words"),
    [
        ("nothing", set(), ""),
        ("module-call-raises", {"eager-linear", "fresh-compile"}, "not installed as a submodule"),
        ("wrong-number", {"eager-linear"}, "an identity nn.Linear gave [[3.0, 6.0]]"),
        ("force-eager", {"fresh-compile"}, "captured 0 graphs"),
        ("fx-flag", {"fresh-compile"}, "FX to symbolically trace"),
    ],
)
def test_a_canary_falls_when_it_must(
    isolation: Isolation, damage: str, fallen: set[str], words: str
) -> None:
    """pytorch#112775 (NameError), and the compile that silently captures nothing."""
    found = isolation.run(canaries_after, {"damage": damage}, deadline=60).value
    assert {name for name, what in found.items() if what} == fallen
    assert all(words in what for what in found.values() if what)


def test_cache_entries_are_counted_or_unreadable() -> None:
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert probes.cache_entries(fresh) == 0
    torch.compile(fresh, backend="eager")(torch.ones(2))
    assert probes.cache_entries(fresh) == 1
    assert probes.cache_entries(len) is None


# -- watch ---------------------------------------------------------------------------------------


class Parked:
    """A thread that goes to a point and stays there until it is let go."""

    def __init__(self, watch: Watch, name: str, *points: str) -> None:
        self._go_on = threading.Event()
        here = threading.Event()

        def body() -> None:
            for point in points:
                watch.on_event(Event(point, name))
            here.set()
            self._go_on.wait(20)

        self._thread = threading.Thread(target=body, name=name)
        self._thread.start()
        assert here.wait(10)

    def __enter__(self) -> Parked:
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join()


def quiet() -> Watch:
    return Watch(interval=0)


def test_a_call_is_exposed_only_to_the_trace_of_another_thread() -> None:
    watch = quiet()
    watch.on_event(Event("trace.begin", "a"))
    watch.on_event(Event("call.enter", "a"))  # inside its own trace: no danger
    assert watch.summary()["exposures"]["fx-trace"] == {}
    watch.on_event(Event("call.enter", "b"))
    watch.on_event(Event("call.enter", "b"))
    assert watch.summary()["exposures"]["fx-trace"] == {"b": 2}
    watch.on_event(Event("trace.left", "a"))
    watch.on_event(Event("call.enter", "b"))
    summary = watch.summary()
    assert summary["exposures"]["fx-trace"] == {"b": 2}
    assert summary["entries"] == {"a": 1, "b": 3} and summary["traces"] == {"a": 1}


def test_a_nested_trace_is_left_when_the_outer_one_is() -> None:
    watch = quiet()
    for point in ("trace.begin", "trace.begin", "trace.left"):
        watch.on_event(Event(point, "a"))
    watch.on_event(Event("call.enter", "b"))
    assert watch.summary()["exposures"]["fx-trace"] == {"b": 1}
    assert watch.summary()["still_in_trace"] == {"a": 1}
    watch.on_event(Event("trace.left", "a"))
    assert watch.summary()["still_in_trace"] == {}


def test_an_annotation_is_exposed_only_to_that_of_another_thread() -> None:
    watch = quiet()
    watch.on_event(Event("annotate.tested", "a"))
    watch.on_event(Event("annotate.tested", "a"))
    watch.on_event(Event("annotate.left", "a"))
    watch.on_event(Event("annotate.tested", "b"))
    watch.on_event(Event("annotate.left", "b"))
    watch.on_event(Event("annotate.left", "a"))
    watch.on_event(Event("annotate.tested", "b"))
    assert watch.summary()["exposures"]["annotation"] == {"b": 1}


def test_leaving_an_annotation_that_was_never_entered_hides_no_later_one() -> None:
    watch = quiet()
    watch.on_event(Event("annotate.left", "a", error=TypeError()))
    watch.on_event(Event("annotate.tested", "a"))
    watch.on_event(Event("annotate.tested", "b"))
    assert watch.summary()["exposures"]["annotation"] == {"b": 1}


def test_the_holder_of_a_victim_is_named_with_its_stack() -> None:
    """Which other thread was it, and where? No report of pytorch#126024 can say."""
    watch = quiet()
    with Parked(watch, "culprit", "trace.begin", "trace.body"):
        watch.on_event(Event("call.enter", "victim"))
        watch.on_event(Event("call.settled", "victim", error=RuntimeError("using FX")))
    holder = watch.holders["victim"]
    assert (holder.thread, holder.state) == ("culprit", "fx-tracing-flag")
    assert {"body", "wait"} <= {frame.function for frame in holder.stack}
    assert watch.summary()["holders"]["victim"]["thread"] == "culprit"


def test_nobody_is_blamed_for_an_error_while_nobody_else_traced() -> None:
    watch = quiet()
    with Parked(watch, "bystander", "trace.begin", "trace.left"):
        watch.on_event(Event("call.settled", "victim", error=RuntimeError("of its own")))
    with Parked(watch, "culprit", "trace.begin"):
        watch.on_event(Event("call.settled", "happy"))
    assert watch.holders == {}


def test_whoever_took_the_annotation_away_is_blamed() -> None:
    watch = quiet()
    for point, thread in (("tested", "a"), ("tested", "b"), ("left", "a")):
        watch.on_event(Event(f"annotate.{point}", thread))
    watch.on_event(Event("annotate.left", "b", error=KeyError("custom")))
    assert (watch.holders["b"].thread, watch.holders["b"].state) == ("a", "traceback-meta")


def test_nobody_is_blamed_for_an_annotation_that_failed_alone() -> None:
    watch = quiet()
    watch.on_event(Event("annotate.tested", "a"))
    watch.on_event(Event("annotate.left", "a", error=KeyError("custom")))
    assert watch.holders == {}


def test_eager_flex_attention_is_counted_per_thread() -> None:
    watch = quiet()
    q = torch.ones(1, 1, 16, 16)
    with Hooks(watch.on_event):
        torch.nn.attention.flex_attention.flex_attention(q, q, q)
    assert watch.summary()["eager_flex"] == {"MainThread": 1}


def test_the_owner_of_the_lock_is_known_while_it_holds_it() -> None:
    watch = quiet()
    for point, thread in (("held", "a"), ("released", "a"), ("held", "b")):
        watch.on_event(Event(f"lock.{point}", thread))
    assert watch.summary()["lock_owner"] == "b"
    watch.on_event(Event("lock.released", "a"))  # late news of an earlier hold
    assert watch.summary()["lock_owner"] == "b"
    watch.on_event(Event("lock.released", "b"))
    assert watch.summary()["lock_owner"] is None


def _wait_until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen in ten seconds")


def test_a_value_whose_repr_comes_to_a_point_does_not_stop_the_bystander() -> None:
    watch = quiet()

    class Speaking:
        def __repr__(self) -> str:
            watch.on_event(Event("call.enter", "bystander"))
            return "spoken"

    probe = Probe("speaking", "-", Speaking, probes.PROCESS, "-", rest=None)
    watch.rest["speaking"] = None
    thread = threading.Thread(target=watch._sample, args=(probe,), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert watch.timeline[-1]["detail"] == "spoken"


def test_the_bystander_sees_a_state_that_is_up_and_none_that_is_not() -> None:
    watch = Watch(interval=0.005)
    fx_traceback.current_meta["stack_trace"] = "left behind"
    try:
        with watch:
            _wait_until(lambda: watch.summary()["seen_by_bystander"].get("traceback-meta", 0) > 1)
    finally:
        del fx_traceback.current_meta["stack_trace"]
    summary = watch.summary()
    assert set(summary["seen_by_bystander"]) == {"traceback-meta"}
    assert "race-bystander" not in {thread.name for thread in threading.enumerate()}
    assert summary["timeline"][0]["what"] == "sees traceback-meta"


def test_a_watch_can_be_opened_again() -> None:
    watch = Watch(interval=0.005)
    with watch:
        pass
    fx_traceback.current_meta["stack_trace"] = "left behind"
    try:
        with watch:
            _wait_until(lambda: watch.summary()["seen_by_bystander"])
    finally:
        del fx_traceback.current_meta["stack_trace"]


def test_the_state_that_an_entry_meets_is_recorded() -> None:
    watch = quiet()
    watch.on_event(Event("call.enter", "b"))
    assert watch.summary()["seen_at_entry"] == {}
    fx_traceback.current_meta["stack_trace"] = "left behind"
    try:
        watch.on_event(Event("call.enter", "b"))
    finally:
        del fx_traceback.current_meta["stack_trace"]
    assert watch.summary()["seen_at_entry"] == {"traceback-meta": 1}


def test_the_timeline_has_an_end_and_says_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.watch._TIMELINE_LIMIT", 3)
    watch = quiet()
    for _ in range(5):
        watch.on_event(Event("step.begin", "a", 2))
    summary = watch.summary()
    assert len(summary["timeline"]) == 3 and summary["timeline_dropped"] == 2
    assert summary["timeline"][0] | {"t": 0} == {
        "t": 0,
        "thread": "a",
        "what": "step.begin",
        "step": 2,
        "detail": "",
    }
