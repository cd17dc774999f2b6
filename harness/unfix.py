"""Takes one of torch's own repairs out again, at run time, for negative controls.

A suite on a repaired torch proves with it that its detectors still see the failure. Each row
says which change it takes out and on which versions it has something to do; on a torch without
the repair it does nothing and says so, or refuses when the repair is required. Use it in an
isolated process only, before anything has compiled: it cannot be taken back.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class UnfixError(ValueError):
    """There is no such unfix, or this torch has not the repair that must be taken out."""


@dataclass(frozen=True)
class Unfix:
    """One upstream repair.

    Attributes:
        name: what tests and options call it.
        repair: the upstream change that it takes out.
        since: first torch version that has the repair.
        apply: takes it out; returns False where the installed torch does not have it.
    """

    name: str
    repair: str
    since: str
    apply: Callable[[], bool]


def _session_flag() -> bool:
    """Since 2.13 a compile session masks the FX flag for every thread (pytorch#184614)."""
    import torch

    if not hasattr(torch.compiler, "_compile_session_context"):
        return False
    torch.compiler._compile_session_context = contextlib.nullcontext  # type: ignore[assignment]
    return True


def _fx_flag_shared() -> bool:
    """Since 2.14 the FX tracing flag is thread-local (pytorch#168999)."""
    import torch.fx._symbolic_trace as st

    if not hasattr(st, "_is_fx_tracing_tls"):
        return False
    st._is_fx_tracing_tls = types.SimpleNamespace()
    return True


def _fx_tracing_flag() -> bool:
    """Both, as before 2.13: the flag is the process's and nothing masks it."""
    return _session_flag() | _fx_flag_shared()


def _metrics_context() -> bool:
    """Since 2.11 each thread has its own metrics context (pytorch#170605)."""
    import torch._dynamo.utils as utils

    if not hasattr(utils, "_metrics_context_tls"):
        return False
    utils._metrics_context_tls = types.SimpleNamespace()  # type: ignore[assignment]
    return True


class _SharedVariable:
    """Behaves like a ``ContextVar`` that all threads share, as the settings were before 2.12."""

    def __init__(self, _name: str, *, default: Any = None) -> None:
        self._value = default

    def get(self, *_default: Any) -> Any:
        return self._value

    def set(self, value: Any) -> Any:
        old, self._value = self._value, value
        return old

    def reset(self, old: Any) -> None:
        self._value = old


def _thread_config() -> bool:
    """Since 2.12 every setting is a context variable, so per thread (pytorch#173568).

    What the calling thread has set is what all threads have afterwards.
    """
    import torch.utils._config_module as config_module

    if not hasattr(config_module, "ContextVar"):
        return False
    for module in list(sys.modules.values()):
        if not isinstance(module, config_module.ConfigModule):
            continue
        for name, entry in module._config.items():
            shared = _SharedVariable(name, default=entry.user_override.get())
            entry.user_override = shared  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if name.endswith("_var") and type(value).__name__ == "ContextVar":
                shared = _SharedVariable(name, default=value.get())
                types.ModuleType.__setattr__(module, name, shared)
    config_module.ContextVar = _SharedVariable  # settings that are installed from now on
    return True


def _cudagraph_tls() -> bool:
    """Since 2.13 a thread makes its CUDA graph trees when it first asks (pytorch#184357)."""
    import torch

    try:
        trees = importlib.import_module("torch._inductor.cudagraph_trees")
    except ImportError:
        return False
    if not hasattr(trees, "graph_capture_lock"):
        return False

    def get_obj(local: Any, name: str) -> Any:
        """Only what the importing thread, or the autograd engine, has put there."""
        if hasattr(local, name):
            return getattr(local, name)
        assert torch._C._is_key_in_tls(name)
        return torch._C._get_obj_in_tls(name)

    trees.get_obj = get_obj
    trees.graph_capture_lock = contextlib.nullcontext()
    return True


_COPIED, _ENTERED = "_cc.copy().run", "_cc.run"


def _backward_context() -> bool:
    """Since 2.14 a compiled backward runs in a copy of its caller's context (pytorch#186659).

    The backward is generated as text: the copy is taken out of the text.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    if _COPIED not in inspect.getsource(runtime_wrappers):
        return False
    from torch._functorch._aot_autograd import codegen  # since 2.14

    compile_text = codegen._compile_and_exec_source

    def without_copy(source: str, *rest: Any, **more: Any) -> Any:
        return compile_text(source.replace(_COPIED, _ENTERED), *rest, **more)

    codegen._compile_and_exec_source = without_copy
    return True


def _dispatch_mode_stack() -> bool:
    """Since 2.11 dynamo asks the thread's own stack of dispatch modes.

    Before, a mode of any thread made it skip the frame, and mark it as skipped for ever; from
    2.14 on such a skip would not be for ever.
    """
    import torch._dynamo.config as config

    entry = getattr(config, "_config", {}).get("inline_torch_dispatch_torch_compile")
    if entry is None or not entry.default:
        return False
    entry.default = False  # for every thread, whatever its own settings
    return True


def _default_device() -> bool:
    """Since 2.2 each thread has its own default device (pytorch#116014)."""
    import torch

    if type(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)).__name__ != "_local":
        return False
    torch._GLOBAL_DEVICE_CONTEXT = types.SimpleNamespace()  # type: ignore[assignment]
    return True


CATALOGUE: dict[str, Unfix] = {
    row.name: row
    for row in (
        Unfix("session-flag", "pytorch#184614", "2.13", _session_flag),
        Unfix("fx-flag-thread-local", "pytorch#168999", "2.14", _fx_flag_shared),
        Unfix("fx-tracing-flag", "pytorch#184614 and #168999", "2.13", _fx_tracing_flag),
        Unfix("metrics-context", "pytorch#170605", "2.11", _metrics_context),
        Unfix("thread-config", "pytorch#173568", "2.12", _thread_config),
        Unfix("cudagraph-tls", "pytorch#184357", "2.13", _cudagraph_tls),
        Unfix("backward-context", "pytorch#186659", "2.14", _backward_context),
        Unfix(
            "dispatch-mode-stack",
            "inline_torch_dispatch_torch_compile",
            "2.11",
            _dispatch_mode_stack,
        ),
        Unfix("default-device", "pytorch#116014", "2.2", _default_device),
    )
}


def unfix(names: Iterable[str], *, required: bool = False) -> dict[str, bool]:
    """Applies the named rows; returns for each whether the installed torch had the repair.

    Args:
        required: a repair that this torch does not have is an error, not False.

    Raises:
        UnfixError: for an unknown name; with ``required``, for a repair that is not there.
    """
    done = {}
    for name in names:
        if name not in CATALOGUE:
            raise UnfixError(f"unknown unfix {name!r}: there are {', '.join(CATALOGUE)}")
        row = CATALOGUE[name]
        done[name] = row.apply()
        if required and not done[name]:
            import torch

            raise UnfixError(
                f"unfix {name}: torch {torch.__version__} does not have the repair {row.repair} "
                f"(since {row.since}), so there is nothing to take out"
            )
    return done
