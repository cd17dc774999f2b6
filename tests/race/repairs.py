"""Repairs that people tried against the FX error, and that do not help. Each is a control.

Each is written as its users wrote it; why it does not help stands beside it. The FX check sits in
the wrapper outside dynamo's lock and runs on every call, so the victim is a *warm* thread.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

Attend = Callable[..., Any]


def lock_per_thread(compiled: Attend) -> Attend:
    """Each thread locks its own calls. Nobody else ever takes that lock."""
    own = threading.Lock()

    def call(*args: Any, **kwargs: Any) -> Any:
        with own:
            return compiled(*args, **kwargs)

    return call


def lock_first_call(compiled: Attend, shared: threading.Lock) -> Attend:
    """One lock for all, round each thread's first call. Later recompiles, and the warm calls that
    are their victims, are outside."""
    first = [True]

    def call(*args: Any, **kwargs: Any) -> Any:
        if first[0]:
            with shared:
                first[0] = False
                return compiled(*args, **kwargs)
        return compiled(*args, **kwargs)

    return call


def sys_modules_shim() -> None:
    """A module with a thread-local flag in the place of torch.fx._symbolic_trace.

    ``Tracer.trace`` and ``is_fx_symbolic_tracing`` look the flag up in their own globals, which
    are the real module's dictionary; nobody who matters asks ``sys.modules``.
    """
    import torch.fx

    real = sys.modules["torch.fx._symbolic_trace"]
    flags = threading.local()

    class Shim(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "_is_fx_tracing_flag":
                return getattr(flags, "value", False)
            return getattr(real, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_is_fx_tracing_flag":
                flags.value = value
            else:
                setattr(real, name, value)

    shim = Shim(real.__name__)
    sys.modules["torch.fx._symbolic_trace"] = shim
    torch.fx._symbolic_trace = shim


def reader_after_wrapping() -> None:
    """The reader replaced after ``torch.compile``: the wrapper has closed over the old one."""
    import torch.fx._symbolic_trace as st

    st.is_fx_symbolic_tracing = lambda: False


def tolerate_nested_trace() -> None:
    """``error_on_nested_fx_trace = False``, in each thread: the error goes, and so does the
    compiled code; the call runs eager and materialises every score."""
    import torch._dynamo

    torch._dynamo.config.error_on_nested_fx_trace = False
