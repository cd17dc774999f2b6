"""How a state is read that is not simply an attribute of a module."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

_OWNER = re.compile(r"owner=(\d+)")


def attribute(module: str, path: str, form: Callable[[Any], Any]) -> Callable[[], Any]:
    """Reads ``module.path`` without importing anything, and gives it the plain form ``form``."""
    names = path.split(".")

    def read() -> Any:
        value: Any = sys.modules[module]
        for name in names:
            value = getattr(value, name)
        return form(value)

    return read


# -- forms -----------------------------------------------------------------------------------------


def as_is(value: Any) -> Any:
    """For what is plain data, or compared by identity."""
    return value


def installed(value: Any) -> str | None:
    """For an object that is there or is not."""
    return None if value is None else "installed"


def size(value: Any) -> int | None:
    """For a cache, whose entries would be too many and too private."""
    return None if value is None else len(value)


def copied(value: Any) -> Any:
    """For a small container that another thread may change while it is compared."""
    return dict(value) if isinstance(value, dict) else list(value)


# -- states with a reader of their own -------------------------------------------------------------


def fx_flag() -> bool:
    """The process's flag, or since 2.14 this thread's."""
    st = sys.modules["torch.fx._symbolic_trace"]
    if hasattr(st, "_is_fx_tracing_flag"):
        return bool(st._is_fx_tracing_flag)
    return bool(st._get_is_fx_tracing())


def own_attribute(name: str) -> Callable[[], Any]:
    """A method as it stands in ``torch.nn.Module`` itself."""

    def read() -> Any:
        import torch

        return vars(torch.nn.Module)[name]

    return read


def region_id() -> int:
    """Which bucket of dynamo's cache compiled calls look into; -1 outside all of them."""
    return int(_eval_frame().get_eval_frame_isolate_recompiles_id())


def by_exchange(setter: str, probing: Any) -> Callable[[], Any]:
    """A C++ flag that only tells its value when it is set: set, and put back at once."""

    def read() -> Any:
        exchange = getattr(_eval_frame(), setter)
        value = exchange(probing)
        exchange(value)
        return value

    return read


def lock_owner() -> str | None:
    """The name of the thread that holds dynamo's compile lock; the lock is not touched."""
    lock = sys.modules["torch._dynamo.convert_frame"].compile_lock
    lock = getattr(lock, "_lock", lock)  # the harness's own wrapper, while hooks are open
    found = _OWNER.search(repr(lock))
    if found is None:
        raise AttributeError("the lock's owner cannot be read")
    ident = int(found[1])
    if ident == 0:
        return None
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return names.get(ident, f"thread {ident}")


def metrics_in_progress() -> bool:
    """Whether a compile of this thread (on 2.9: of any) has its metrics context open."""
    utils = sys.modules["torch._dynamo.utils"]
    return bool(utils.get_metrics_context().in_progress())


def tracing_context() -> str | None:
    """Whether this thread is inside a compile, as torch itself keeps it."""
    return installed(sys.modules["torch._guards"].TracingContext.try_get())


def thread_local(module: str, holder: str, name: str, default: Any) -> Callable[[], Any]:
    """An attribute of a thread-local object that a thread may never have set."""

    def read() -> Any:
        return getattr(getattr(sys.modules[module], holder), name, default)

    return read


def inductor_graph() -> str | None:
    """Whether Inductor lowers a graph in this thread."""
    virtualized = sys.modules["torch._inductor.virtualized"]
    graph = virtualized.V.graph
    return None if isinstance(graph, virtualized.NullHandler) else "lowering"


def call(path: str, *arguments: Any) -> Callable[[], Any]:
    """Calls a function of torch, named by its path from ``torch`` on."""
    names = path.split(".")

    def read() -> Any:
        import torch

        value: Any = torch
        for name in names:
            value = getattr(value, name)
        return value(*arguments)

    return read


def default_device() -> str:
    """This thread's default device."""
    import torch

    return str(torch.get_default_device())


def config(module: str, *names: str) -> Callable[[], dict[str, Any]]:
    """The named settings, as this thread has them; those that this torch has not are left out."""

    def read() -> dict[str, Any]:
        settings = sys.modules[module]
        return {name: getattr(settings, name) for name in names if hasattr(settings, name)}

    return read


def environment(name: str) -> Callable[[], str | None]:
    """A variable of the process's environment."""
    return lambda: os.environ.get(name)


def modes_by_flag() -> bool:
    """Whether dynamo asks the process's flags, and not the thread's own stack, about modes."""
    settings = sys.modules.get("torch._dynamo.config")
    return not getattr(settings, "inline_torch_dispatch_torch_compile", False)


def pending_callbacks() -> int:
    """How many compiles have told their start, and not yet their end, to dynamo's callbacks."""
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    return int(handler._CompilationCallbackHandler__pending_callbacks_counter)


def flex_cache_entries() -> int:
    """Entries that all compiled wrappers of flex_attention share, in all threads."""
    from harness.probes.canaries import cache_entries

    flex = sys.modules["torch.nn.attention.flex_attention"]
    count = cache_entries(flex.flex_attention)
    if count is None:
        raise AttributeError("cache entries cannot be listed")
    return count


def _eval_frame() -> Any:
    import torch

    return torch._C._dynamo.eval_frame
