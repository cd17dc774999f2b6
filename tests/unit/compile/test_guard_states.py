"""Each row of the table of states: the harm is real without its patch and gone with it.

The threads meet at events and barriers inside torch; nothing depends on timing.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import threading
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.compiler
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.traceback as fx_traceback

from dflash.compile.states import STATES, WATCHED
from harness.unfix import unfix

WAIT = 20.0  # seconds; only a failure gets near it
ROWS = {row.name: row for row in STATES}

needs_session = pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"),
    reason="this torch has no compile session",
)
patched_or_not = pytest.mark.parametrize("patched", [False, True], ids=["as-it-is", "patched"])


@contextlib.contextmanager
def state(name, patched):
    """The row's patch, in or not; with it in, the torch at hand must have something to patch."""
    if not patched:
        yield
        return
    patch = ROWS[name].patch()
    assert patch is not None, f"nothing to do for {name}"
    patch.install()
    try:
        yield
    finally:
        patch.remove()


@contextlib.contextmanager
def parked(enter):
    """Another thread runs ``enter(park)`` and is inside ``park()`` while the block runs."""
    inside, go_on = threading.Event(), threading.Event()
    errors = []

    def park():
        inside.set()
        assert go_on.wait(WAIT)

    def run():
        try:
            enter(park)
        except BaseException as error:
            errors.append(error)
            inside.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(WAIT)
    try:
        yield
    finally:
        go_on.set()
        thread.join(WAIT)
    assert not errors, errors


def trace_parked(park):
    def traced(x):
        park()
        return x

    torch.fx.Tracer().trace(traced)


def compile_parked(park):
    def backend(graph, _inputs):
        park()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


# -- fx-tracing-flag -------------------------------------------------------------------------------


def compiled_call_beside_a_trace(patched):
    unfix(["fx-tracing-flag"])
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(2))
    with state("fx-tracing-flag", patched), parked(trace_parked):
        raw = symbolic_trace.is_fx_tracing()
        try:
            return [raw, compiled(torch.ones(2)).tolist()]
        except RuntimeError as error:
            return [raw, str(error)]


@patched_or_not
def test_fx_flag_stops_a_compiled_call_of_another_thread(isolated, patched):
    """pytorch#126024: one thread traces, another one calls compiled code."""
    raw, result = isolated(compiled_call_beside_a_trace, patched=patched)
    if patched:
        assert (raw, result) == (False, [2, 2])
    else:
        assert raw and "symbolically trace a dynamo-optimized function" in result


# -- compile-session -------------------------------------------------------------------------------


def is_compiling_beside_a_compile(patched):
    with state("compile-session", patched), parked(compile_parked):
        return torch.compiler.is_compiling()


@needs_session
@patched_or_not
def test_compile_session_is_seen_by_other_threads(isolated, patched):
    """pytorch#184614: while one thread compiles, every thread is told that it compiles."""
    assert isolated(is_compiling_beside_a_compile, patched=patched) is not patched


def weights_after_steps(beside):
    """Eager AdamW (foreach): all weights after some steps, as exact numbers."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 7, generator=generator).requires_grad_() for n in (3, 5, 8)]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, foreach=True)
    for _ in range(20):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        with beside():
            optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def optimizer_beside_a_compile(patched):
    alone = weights_after_steps(contextlib.nullcontext)
    with state("compile-session", patched), parked(compile_parked):
        beside = weights_after_steps(contextlib.nullcontext)
    return [torch.equal(alone, beside), float((alone - beside).abs().max())]


@needs_session
@patched_or_not
def test_optimizer_step_beside_a_compile(isolated, patched):
    """An eager step takes its traced branch, and other numbers come out; patched, bit for bit."""
    equal, difference = isolated(optimizer_beside_a_compile, patched=patched)
    assert equal is patched
    assert difference < 1e-4, "close enough that nobody would notice"


# -- traceback-meta --------------------------------------------------------------------------------


def annotate_together(patched):
    """Both threads ask whether there is an annotation before either has made one."""
    asked, inside = threading.Barrier(2), threading.Barrier(2)
    errors = []

    def copy(value):
        asked.wait(WAIT)
        return dict(value)

    def annotate(who):
        try:
            with fx_traceback.annotate({who: 1}):
                inside.wait(WAIT)
        except Exception as error:
            errors.append(repr(error))

    with state("traceback-meta", patched):
        fx_traceback.copy = SimpleNamespace(copy=copy)
        threads = [threading.Thread(target=annotate, args=(who,)) for who in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    return errors


@patched_or_not
def test_annotations_of_two_threads_collide(isolated, patched):
    """``KeyError: 'custom'``: the second thread to leave finds its entry deleted."""
    expected = [] if patched else ["KeyError('custom')"]
    assert isolated(annotate_together, patched=patched) == expected


def annotate_overlapping(patched):
    """The other thread enters inside this one's annotation and leaves after it."""

    def other(park):
        with fx_traceback.annotate({"other": 1}):
            park()

    with state("traceback-meta", patched):
        with contextlib.ExitStack() as stack:
            with fx_traceback.annotate({"mine": 1}):
                stack.enter_context(parked(other))
                seen = dict(fx_traceback.current_meta["custom"])
        left = dict(fx_traceback.current_meta)
    return [seen, left]


@patched_or_not
def test_annotation_of_another_thread_is_seen_and_left_behind(isolated, patched):
    """One thread's nodes get the other's annotation, and it stays in the process for good."""
    seen, left = isolated(annotate_overlapping, patched=patched)
    if patched:
        assert (seen, left) == ({"mine": 1}, {})
    else:
        assert seen == {"mine": 1, "other": 1}
        assert left == {"custom": {"mine": 1}}


def preserve_and_alias(patched):
    """``preserve_node_meta`` rebinds the dictionary; flex_attention holds it by another name."""
    hop = importlib.import_module("torch._higher_order_ops.flex_attention")
    if not hasattr(hop, "current_meta"):
        return {"skip": "flex_attention holds no reference to the metadata on this torch"}

    def other(park):
        with fx_traceback.preserve_node_meta(), fx_traceback.annotate({"other": 1}):
            park()

    with state("traceback-meta", patched):
        with parked(other):
            preserved = fx_traceback.has_preserved_node_meta()
            meta = dict(hop.current_meta)
        with fx_traceback.annotate({"mine": 1}):
            same = hop.current_meta is fx_traceback.current_meta
    return [preserved, meta, same]


@patched_or_not
def test_metadata_reached_by_another_name(isolated, patched):
    """The alias in flex_attention's module is the calling thread's dictionary too."""
    preserved, meta, same = isolated(preserve_and_alias, patched=patched)
    if patched:
        assert (preserved, meta, same) == (False, {}, True)
    else:
        assert preserved and meta == {"custom": {"other": 1}}


# -- the rows that have nothing to do here ---------------------------------------------------------


def test_metrics_context_is_per_thread_already():
    """Since pytorch#170605; before, the row patches the two contexts."""
    from torch._dynamo import utils

    shared = hasattr(utils, "_METRICS_CONTEXT")
    assert (ROWS["metrics-context"].patch() is not None) == shared
    if not shared:
        assert isinstance(utils._metrics_context_tls, threading.local)


def device_guard():
    patch = ROWS["cuda-device-guard"].patch()
    if patch is None:
        return None
    before = torch._C._ensureCUDADeviceGuardSet
    patch.check()
    patch.install()
    inside = torch._C._ensureCUDADeviceGuardSet
    patch.remove()
    return [inside is before, inside(), torch._C._ensureCUDADeviceGuardSet is before]


def test_device_guard_row_is_for_cuda_builds_without_a_gpu(isolated):
    """There it replaces the C++ look for a device, and puts it back; elsewhere it does nothing."""
    lonely = torch.version.cuda is not None and not torch.cuda.is_available()
    expected = [False, None, True] if lonely else None
    assert isolated(device_guard) == expected


def test_fx_flag_row_leaves_a_thread_local_flag_alone():
    """Since pytorch#168999 torch keeps it per thread; a row that has nothing to do says so."""
    repaired = isinstance(getattr(symbolic_trace, "_is_fx_tracing_tls", None), threading.local)
    assert (ROWS["fx-tracing-flag"].patch() is None) == repaired


def fx_flag_taken_out():
    symbolic_trace._is_fx_tracing_tls = SimpleNamespace()
    patch = ROWS["fx-tracing-flag"].patch()
    patch.install()
    inside = type(symbolic_trace._is_fx_tracing_tls) is threading.local
    patch.remove()
    return [inside, type(symbolic_trace._is_fx_tracing_tls) is SimpleNamespace]


def test_fx_flag_row_repairs_a_shared_flag_object(isolated):
    """The form that the flag has since 2.14, with the repair taken out."""
    assert isolated(fx_flag_taken_out) == [True, True]


# -- all of them -----------------------------------------------------------------------------------


def seen_by(start):
    """What a thread sees of the watched flags and metadata that this one has set."""
    with contextlib.ExitStack() as stack:
        for name in ("fx-tracing-flag", "compile-session", "traceback-meta"):
            if ROWS[name].patch() is not None:
                stack.enter_context(state(name, patched=True))
        symbolic_trace._is_fx_tracing_flag = True
        torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
        fx_traceback.current_meta["custom"] = {"mine": 1}
        done, seen = threading.Event(), []

        def look():
            seen.extend(
                [
                    symbolic_trace.is_fx_tracing(),
                    torch.compiler.is_compiling(),
                    torch.compiler.is_exporting(),
                    dict(fx_traceback.current_meta),
                    fx_traceback.has_preserved_node_meta(),
                ]
            )
            done.set()

        if start == "engine":
            _thread.start_new_thread(look, ())
        else:
            threading.Thread(target=look).start()
        assert done.wait(WAIT)
        mine = [torch.compiler.is_compiling(), dict(fx_traceback.current_meta)]
    return [seen, mine, torch.compiler.is_compiling(), dict(fx_traceback.current_meta)]


@pytest.mark.parametrize("start", ["thread", "engine"])
def test_a_new_thread_sees_values_at_rest(isolated, start):
    """An autograd engine thread, which Python did not start, like any other; then all is undone."""
    seen, mine, after, meta = isolated(seen_by, start=start)
    assert seen == [False, False, False, {}, False]
    assert mine == [True, {"custom": {"mine": 1}}]
    assert (after, meta) == (False, {})


def test_every_row_says_what_it_does_and_where_it_is_from():
    """One row per state, and the watched flags are among what the rows make per thread."""
    for row in STATES:
        assert row.name and row.harm and row.source
    names = {name for row in STATES for name in getattr(row.patch(), "rest", {})}
    native = {"_is_fx_tracing_flag"} if hasattr(symbolic_trace, "_is_fx_tracing_tls") else set()
    assert names | native >= WATCHED
