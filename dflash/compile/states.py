"""The process-wide state of torch that kills or misleads a thread which runs compiled code.

One row per state: where it lives, what a new thread starts with, what it does to a drafter and
where that was reported. A row that the installed torch does not have, or already keeps per
thread, has nothing to do. Adding a state is adding a row.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash.compile.one_trace import OneTraceAtATime
from dflash.compile.thread_state import ThreadLocalGlobals


class Patch(Protocol):
    """Something that can be installed and taken out again; ``check`` raises where it cannot."""

    def check(self) -> None: ...

    def install(self) -> None: ...

    def remove(self) -> None: ...


@dataclass(frozen=True)
class SharedState:
    """One row.

    Attributes:
        name: as explanations and tests call it.
        harm: what another thread's value does to this one.
        source: report or change.
        patch: a patch that makes it per thread, or None where this torch needs none.
        instead: what the patch does where the state stays the process's.
    """

    name: str
    harm: str
    source: str
    patch: Callable[[], Patch | None]
    instead: str = ""


# Flags whose holders are counted: a compiled call that begins while another thread holds one
# was in danger, and the guard has intercepted it.
WATCHED = frozenset({"_is_fx_tracing_flag", "_is_compiling_flag"})


def _globals(module_name: str, rest: dict[str, Callable[[], Any]]) -> Patch | None:
    module = importlib.import_module(module_name)
    present = {name: make for name, make in rest.items() if name in vars(module)}
    if not present:
        return None
    return ThreadLocalGlobals(module, present, WATCHED & present.keys())


def _false() -> bool:
    return False


def _none() -> None:
    return None


def _fx_flag() -> Patch | None:
    import torch.fx._symbolic_trace as st

    if "_is_fx_tracing_tls" in vars(st):
        if isinstance(st._is_fx_tracing_tls, threading.local):
            return None
        return _Replace(st, "_is_fx_tracing_tls", threading.local)
    return _globals("torch.fx._symbolic_trace", {"_is_fx_tracing_flag": _false})


def _compile_session() -> Patch | None:
    return _globals(
        "torch.compiler",
        {
            "_is_compiling_flag": _false,
            "_is_exporting_flag": _false,
            "_is_non_strict_tracing_flag": _false,
        },
    )


def _traceback_meta() -> Patch | None:
    return _globals(
        "torch.fx.traceback",
        {
            "current_meta": dict,
            "current_replay_node": _none,
            "should_preserve_node_meta": _false,
            "_should_preserve_node_meta": _false,
        },
    )


def _metrics() -> Patch | None:
    from torch._dynamo import utils

    rest: dict[str, Callable[[], Any]] = {}
    for name in ("_METRICS_CONTEXT", "_RUNTIME_METRICS_CONTEXT"):
        shared = vars(utils).get(name)
        if shared is not None:
            rest[name] = _like(shared)
    return _globals("torch._dynamo.utils", rest)


def _like(context: Any) -> Callable[[], Any]:
    return lambda: type(context)(on_exit=context._on_exit)


def _device_guard() -> Patch | None:
    # The C++ function looks for a CUDA device without a lock; without a GPU two threads crash.
    shared = hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    if not shared or torch.version.cuda is None or torch.cuda.is_available():
        return None
    return _Replace(torch._C, "_ensureCUDADeviceGuardSet", lambda: _none)


STATES: tuple[SharedState, ...] = (
    SharedState(
        "fx-tracing-flag",
        "a compiled call raises 'Detected that you are using FX to symbolically trace ...'",
        "pytorch#126024, #168999",
        _fx_flag,
    ),
    SharedState(
        "compile-session",
        "eager optimizers, hooks and collectives take their traced branch",
        "pytorch#184614",
        _compile_session,
    ),
    SharedState(
        "traceback-meta",
        "KeyError: 'custom' out of torch.fx.traceback.annotate, or an annotation left behind",
        "pytorch#184917",
        _traceback_meta,
    ),
    SharedState(
        "metrics-context",
        "RuntimeError: Metric(s) {'is_forward'} have already been set in the current context",
        "pytorch#170605",
        _metrics,
    ),
    SharedState(
        "cuda-device-guard",
        "segmentation fault in FakeTensorMode.__enter__ of a CUDA build without a GPU",
        "seen on 2.11.0",
        _device_guard,
    ),
    SharedState(
        "fx-patches",
        "nn.Module stays patched by another thread's make_fx: later compiles capture no graph",
        "pytorch#168042, #187589",
        OneTraceAtATime,
        instead="FX traces wait for one another",
    ),
)


class _Replace:
    """A module attribute replaced by what ``make`` returns."""

    def __init__(self, owner: Any, name: str, make: Callable[[], Any]) -> None:
        self.owner, self.name, self.make = owner, name, make

    def check(self) -> None:
        getattr(self.owner, self.name)

    def install(self) -> None:
        self.saved = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.make())

    def remove(self) -> None:
        setattr(self.owner, self.name, self.saved)
