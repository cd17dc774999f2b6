"""The guards, one class each; :mod:`dflash.compile.guard` says what each one costs."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace

from dflash.compile.base import CompileGuard, GuardError
from dflash.compile.states import STATES


class ThreadLocalGuard(CompileGuard):
    """Shared state made per thread where it is read."""

    name = "thread-local"
    needs = tuple(row.name for row in STATES)

    def _explain(self, made: list[str]) -> str:
        return f"made per thread: {', '.join(made) or 'nothing, this torch does it all itself'}"


class ForceCompileGuard(CompileGuard):
    """torch's own switch, set in each thread."""

    name = "force-compile"
    # The compile session stays the process's: it hides the FX flag, which is shared here, from
    # compiled code that is not behind the guard.
    needs = tuple(
        row.name for row in STATES if row.name not in ("fx-tracing-flag", "compile-session")
    )

    @classmethod
    def available(cls) -> str | None:
        if not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"):
            return f"torch {torch.__version__} has no force_compile_during_fx_trace (2.11 has)"
        return super().available()

    def _explain(self, made: list[str]) -> str:
        also = f"; made per thread: {', '.join(made)}" if made else ""
        return f"force_compile_during_fx_trace is set in each calling thread{also}"

    def _config(self) -> dict[str, Any]:
        return super()._config() | {"force_compile_during_fx_trace": True}

    def _in_danger(self) -> bool:
        return _raw_fx_flag() and not _this_thread_traces()

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._arrive()
        if _raw_fx_flag() and _this_thread_traces():
            # A genuine nested trace: torch shall judge it as it would without the guard.
            with torch._dynamo.config.patch(force_compile_during_fx_trace=False):
                return compiled(*args, **kwargs)
        return compiled(*args, **kwargs)


class SerialGuard(CompileGuard):
    """Compile everything first; afterwards a compile is an error."""

    name = "serial"
    # Warm code still annotates and reads metrics; it must not meet another thread's. A foreign
    # trace beside the warm-up must not damage what is compiled later.
    needs = ("traceback-meta", "metrics-context", "cuda-device-guard", "fx-patches")

    _home = 0  # id of the thread that entered, or that warms up
    _warming = False

    def _enter(self) -> None:
        self._home = threading.get_ident()

    def _explain(self, made: list[str]) -> str:
        return "everything compiles in warm_up(), one after the other; a later compile is an error"

    def warm_up(self, tasks: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        self._home, self._warming = threading.get_ident(), True
        try:
            compiled = super().warm_up(tasks)
        finally:
            self._warming = False
        self._sealed = True
        return compiled

    def _arrive(self) -> None:
        # A recompute in the warm-up's own backward comes from an engine thread.
        at_home = threading.get_ident() == self._home or (self._warming and _on_engine_thread())
        if not (self._sealed or at_home):
            raise GuardError(
                "the guard 'serial' was not warmed up: call warm_up() before the threads start"
            )
        super()._arrive()


class LockGuard(CompileGuard):
    """One lock round every call and backward."""

    name = "lock"
    # Not a race that a lock could end: a CUDA build without a GPU crashes in its second thread.
    needs = ("cuda-device-guard",)
    # Threads also run eager code, outside of any lock of ours: torch's mask builder annotates, and
    # somebody's make_fx traces.
    likes = ("traceback-meta", "fx-patches")

    def __init__(self, *, recompile_limit: int, passed_over: Sequence[str] = ()) -> None:
        super().__init__(recompile_limit=recompile_limit, passed_over=passed_over)
        self.lock = threading.RLock()
        self._in_backward = False

    def _explain(self, made: list[str]) -> str:
        also = f"; made per thread: {', '.join(made)}" if made else ""
        return f"one lock round every compiled call and every region(); no two overlap{also}"

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        with self.lock:
            outer, self._in_backward = self._in_backward, True
            try:
                yield
            finally:
                self._in_backward = outer

    def region(self) -> contextlib.AbstractContextManager[None]:
        return self._region()

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # A recompute inside a CUDA backward runs on an engine thread while the lock's owner waits
        # for that backward: it belongs to the owner, and waiting for the lock would be for ever.
        # Only one backward can be under way.
        if self._in_backward and _on_engine_thread():
            return super()._call(compiled, args, kwargs)
        # A genuine nested trace, which torch refuses. It holds dynamo's lock, and the owner of ours
        # may be waiting for that.
        if _raw_fx_flag() and _this_thread_traces():
            return super()._call(compiled, args, kwargs)
        with self.lock:
            return super()._call(compiled, args, kwargs)


def _on_engine_thread() -> bool:
    """Whether Python did not start the calling thread; the autograd engine did, that is."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _raw_fx_flag() -> bool:
    flag = getattr(symbolic_trace, "_is_fx_tracing_flag", None)
    return bool(symbolic_trace._get_is_fx_tracing() if flag is None else flag)


def _this_thread_traces() -> bool:
    """Whether ``Tracer.trace`` is on this thread's own stack. Only asked while a flag is up."""
    trace = inspect.unwrap(torch.fx.Tracer.trace).__code__
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is trace:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
