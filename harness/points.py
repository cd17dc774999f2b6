"""The names of the points at which the harness looks or waits, and the event that one sends.

The points of :data:`POINTS` are always installed, those of :data:`PLACES` when a schedule or a
listener asks for them by name. Any other function or line can be named as a place
(:mod:`harness.places`), ``torch._dynamo.eval_frame:innermost_fn@entry``, and all lines of a file
at once (:mod:`harness.linewise`), ``torch/fx/_symbolic_trace.py:*``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from harness.linewise import is_line_pattern
from harness.places import is_place

# name -> what it means. `schedule` scripts and reports use these names and no others.
POINTS: dict[str, str] = {
    "step.begin": "a crew member begins a work step",
    "step.end": "a crew member has finished a work step",
    "call.arrive": "a thread is about to enter a compiled function (outermost call only)",
    "call.enter": "it does so now: what is recorded here is what the call meets",
    "call.checked": "the wrapper's checks have let the thread pass",
    "call.settled": "the first of: checked, or the call has ended without being checked",
    "call.exit": "the compiled function has returned or raised",
    "trace.begin": "a thread is about to enter Tracer.trace",
    "trace.body": "the traced function (not a module) runs: the flag is up, nn.Module patched",
    "trace.end": "the traced function has ended, Tracer.trace has not",
    "trace.left": "Tracer.trace has ended and put its state back",
    "annotate.arrive": "a thread is about to enter torch.fx.traceback.annotate",
    "annotate.tested": "torch.fx.traceback.annotate has looked whether an annotation is there",
    "annotate.write": "annotate is about to write",
    "annotate.body": "the block under annotate runs",
    "annotate.end": "the block under annotate has ended, annotate has not put its state back",
    "annotate.left": "annotate has put its state back (or failed to)",
    "flex.eager": "flex_attention runs its uncompiled path",
    "lock.wait": "a thread asks for dynamo's compile_lock",
    "lock.held": "a thread has taken dynamo's compile_lock",
    "lock.released": "a thread has given dynamo's compile_lock back",
}

_AOT = "torch._functorch._aot_autograd"
_BACKWARD = f"{_AOT}.runtime_wrappers:_AutogradBackwardCompiler.get_or_compile"
_BACKWARD_BEFORE_2_13 = (
    f"{_AOT}.runtime_wrappers:AOTDispatchAutograd.post_compile.CompiledFunction._backward_impl"
)

# name -> (what it means, where it is: the first place that this torch has).
PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dynamo.begin": (
        "dynamo begins to compile a frame",
        ("torch._dynamo.convert_frame:_compile@entry",),
    ),
    "dynamo.end": (
        "dynamo has compiled a frame, or failed to",
        ("torch._dynamo.convert_frame:_compile@exit",),
    ),
    "aot.begin": (
        "AOTAutograd begins with a graph",
        ("torch._functorch.aot_autograd:aot_module_simplified@entry",),
    ),
    "aot.end": (
        "AOTAutograd has ended",
        ("torch._functorch.aot_autograd:aot_module_simplified@exit",),
    ),
    "inductor.begin": (
        "Inductor begins with a graph",
        ("torch._inductor.compile_fx:compile_fx_inner@entry",),
    ),
    "inductor.end": (
        "Inductor has ended",
        ("torch._inductor.compile_fx:compile_fx_inner@exit",),
    ),
    "backward.begin": (
        "the backward of a compiled function is about to run",
        (f"{_BACKWARD}@entry", f"{_BACKWARD_BEFORE_2_13}@entry"),
    ),
    "backward.first": (
        "it has no compiled backward yet and is about to compile it",
        (
            f"{_BACKWARD}@line:/^self._prepare_lazy_backward_context\\(/",
            f"{_BACKWARD_BEFORE_2_13}@line:/^assert lazy_backward_info is not None/",
            f"{_BACKWARD_BEFORE_2_13}@line:/^if lazy_backward_info is None:/",  # 2.11, 2.12
        ),
    ),
    "cache.lookup": (
        "AOTAutograd looks a graph up in its cache",
        (f"{_AOT}.autograd_cache:AOTAutogradCache._lookup@entry",),
    ),
    "cache.store": (
        "AOTAutograd stores a graph in its cache",
        (f"{_AOT}.autograd_cache:AOTAutogradCache.save@entry",),
    ),
    "inductor-cache.lookup": (
        "Inductor looks a graph up in its cache",
        ("torch._inductor.codecache:FxGraphCache._lookup_graph@entry",),
    ),
    "inductor-cache.store": (
        "Inductor stores a graph in its cache",
        ("torch._inductor.codecache:FxGraphCache._save_graph@entry",),
    ),
    "config.write": (
        "a compile option is about to be written",
        ("torch.utils._config_module:ConfigModule.__setattr__@entry",),
    ),
    "meta.preserve": (
        "torch.fx.traceback is about to save and keep node metadata",
        ("torch.fx.traceback:preserve_node_meta@entry",),
    ),
    "meta.restored": (
        "torch.fx.traceback has put its metadata back",
        ("torch.fx.traceback:preserve_node_meta@exit",),
    ),
    "meta.node": (
        "the metadata is about to become a node's",
        ("torch.fx.traceback:set_current_meta@entry",),
    ),
    "patch.install": (
        "the prior patcher has been read, the new one is about to be written",
        ("torch.fx._symbolic_trace:_new_patcher@line:/^CURRENT_PATCHER = _Patcher\\(\\)/",),
    ),
    "patch.enter": (
        "the new patcher is written, and is about to be handed to its trace",
        ("torch.fx._symbolic_trace:_new_patcher@line:/^yield CURRENT_PATCHER/",),
    ),
    "patch.revert": (
        "the patches of nn.Module are about to be taken back",
        ("torch.fx._symbolic_trace:_new_patcher@line:/^CURRENT_PATCHER.revert_all_patches\\(\\)/",),
    ),
    "patch.left": (
        "the prior patcher is back",
        ("torch.fx._symbolic_trace:_new_patcher@exit",),
    ),
    "triton.compile": (
        "Triton is about to compile a kernel",
        ("triton.compiler.compiler:compile@entry",),
    ),
    "triton.compiled": (
        "Triton has compiled a kernel",
        ("triton.compiler.compiler:compile@exit",),
    ),
    "triton.autotune": (
        "a Triton autotuner is about to run its kernel, and to tune it when it is new",
        ("triton.runtime.autotuner:Autotuner.run@entry",),
    ),
    "triton.autotuned": (
        "the autotuner has ended",
        ("triton.runtime.autotuner:Autotuner.run@exit",),
    ),
}

# What a trial's timeline shows beyond POINTS. Inductor's only when it is loaded already: nobody
# shall pay for its import who compiles with another backend.
STAGES = (
    "aot.begin",
    "aot.end",
    "inductor.begin",
    "inductor.end",
    "torch.autograd.graph:_engine_run_backward@entry",
    "torch.autograd.graph:_engine_run_backward@exit",
)


def stages(loaded: Container[str]) -> list[str]:
    """Those of :data:`STAGES` that cost no import, given the names of the loaded modules."""
    inductor = "torch._inductor.compile_fx" in loaded
    return [name for name in STAGES if inductor or not name.startswith("inductor.")]


def is_point(text: str) -> bool:
    """Whether ``text`` is the name of a point or the text form of a place."""
    return text in POINTS or text in PLACES or is_place(text)


def to_install(wanted: Iterable[str]) -> list[str]:
    """Those of the wanted points that are not always installed; ``patch.*`` means all of these.

    Raises:
        ValueError: a name or pattern that no point has.
    """
    names: dict[str, None] = {}
    for want in wanted:
        if is_place(want):
            names[want] = None
            continue
        if is_line_pattern(want):
            continue  # harness.linewise sends those
        if not (found := [name for name in (*POINTS, *PLACES) if fnmatchcase(name, want)]):
            raise ValueError(f"no point is called {want!r}")
        names |= {name: None for name in found if name in PLACES}
    return list(names)


@dataclass(frozen=True)
class Event:
    """A thread is at a point.

    Attributes:
        point: a key of :data:`POINTS`.
        thread: the thread's name.
        step: the crew member's work step, or None outside a crew.
        error: the exception that is passing the point, if one is.
        depth: with ``trace.*``, how many traces the thread is inside, this one included.
        what: with ``lock.*``, the lock's name.
    """

    point: str
    thread: str
    step: int | None = None
    error: BaseException | None = None
    depth: int = 0
    what: str = ""
