"""The compile guard: lets several threads call ``torch.compile``d functions in one process.

=================  ===============================================================================
``thread-local``   every piece of shared tracing state that this torch has is made per thread
                   where it is read (:mod:`dflash.compile.states`). Warm calls run while others
                   compile. Cost: some attribute reads per call.
``force-compile``  the wrapper's FX check is switched off by torch's own
                   ``force_compile_during_fx_trace``, in every thread; the other states as above.
                   Needs torch >= 2.11.
``serial``         everything is compiled in :meth:`CompileGuard.warm_up`, one thunk after the
                   other; then any compile is an error. Cost: start-up is the sum of all compiles.
``lock``           one lock round every compiled call and every backward. Patches nothing. Cost:
                   a warm step waits for whoever compiles, and no two calls overlap.
``auto``           ``thread-local`` where it can be installed, else ``force-compile``, else
                   ``serial``; :attr:`CompileGuard.explanation` says which and why.
=================  ===============================================================================

All of them give each compiled function its own code object (so its own cache and its own
recompile limit), set dynamo's per-thread configuration in each thread that calls, count
compiles, and make a hit recompile limit an error instead of a silent fall to eager.

Correct single-thread behaviour stays: a genuine FX trace over a compiled function, on the thread
that traces, still gets torch's error.

Enter the guard in one thread, before the others start; leave it after they have ended.

What an autograd engine thread (CUDA backward) sees: values at rest, and its own configuration.
The limits given to ``torch.compile`` itself (torch >= 2.13) hold there too; a compiled call made
from there goes through :class:`GuardedFunction` like any other and sets the rest on arrival.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace

from dflash.compile.states import STATES, WATCHED, Patch, SharedState
from dflash.compile.thread_state import StateError, held_elsewhere
from dflash.compile.versions import require_supported

Backend = str | Callable[..., Any]


class GuardError(RuntimeError):
    """The guard cannot be had, or does not do what it should; one line says what to do."""


class RecompileError(GuardError):
    """Something compiled after the serial warm-up was over."""


class CompileGuard:
    """Base of the guards by name; get one from :func:`compile_guard`.

    Attributes:
        name: the guard in force (never ``auto``).
        explanation: one line: what was chosen and why.
        compiles: label -> number of graphs that went to a backend.
        intercepted: compiled calls that began while another thread held tracing state. On a
            torch that keeps all of it per thread already there is nothing to count.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()  # rows of STATES that this guard makes per thread

    def __init__(self, *, recompile_limit: int) -> None:
        self.recompile_limit = recompile_limit
        self.explanation = ""
        self.compiles: Counter[str] = Counter()
        self.intercepted = 0
        self._count_lock = threading.Lock()
        self._prepared = threading.local()
        self._stack = contextlib.ExitStack()
        self._sealed = False

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> CompileGuard:
        try:
            made = [row.name for row in STATES if row.name in self.needs and self._install(row)]
            self._enter()
            self._stack.enter_context(self.thread())
        except BaseException:
            self._stack.close()
            raise
        self.explanation = f"{self.name}: {self._explain(made)}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    @classmethod
    def available(cls) -> str | None:
        """None where this guard works on the installed torch, else why it does not."""
        return None

    def _install(self, row: SharedState) -> bool:
        patch: Patch | None = row.patch()
        if patch is None:
            return False
        patch.install()
        self._stack.callback(patch.remove)
        return True

    def _enter(self) -> None:
        """What this guard does beyond the states."""

    def _explain(self, made: list[str]) -> str:
        raise NotImplementedError

    # -- what a thread uses --------------------------------------------------------------------

    def compile(
        self,
        function: Callable[..., Any],
        *,
        label: str | None = None,
        backend: Backend = "inductor",
        dynamic: bool | None = False,
        fullgraph: bool = False,
    ) -> GuardedFunction:
        """``torch.compile(function)`` behind this guard; make one per thread.

        Args:
            function: a plain function gets its own copy of its code, so its own cache. Another
                callable (an ``nn.Module``, say) is compiled as it is.
            label: name in :attr:`compiles`; default: the function's name.
            backend: dynamo backend by name, or a callable.
            dynamic, fullgraph: as in ``torch.compile``.
        """
        label = label or getattr(function, "__name__", type(function).__name__)
        options: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
        # Travels with the function, so it holds on autograd threads, where the config does not.
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            options["recompile_limit"] = self.recompile_limit
        own = with_own_code(function, label)
        compiled = torch.compile(own, backend=self._counting(label, backend), **options)
        return GuardedFunction(self, compiled, own, label)

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Put this round every ``backward()``: the first one may compile, and ``lock`` needs it."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """Sets dynamo's configuration in this thread and puts it back.

        A thread that calls a guarded function without this is configured on its first call,
        and stays so until it ends.
        """
        config = torch._dynamo.config
        saved = {name: getattr(config, name) for name in self._config()}
        self._prepare()
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(config, name, value)
            self._prepared.done = False

    def warm_up(self, tasks: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        """Runs the thunks one after the other; returns label -> compiles that they caused.

        Each thunk should run forward **and** backward, once per shape and per mode (training,
        evaluation) that will be used later.
        """
        before = Counter(self.compiles)
        for task in tasks.values():
            task()
        return dict(self.compiles - before)

    def prove(self) -> str:
        """Shows that the guard intercepts, by making the danger real; one line on success.

        Raises:
            GuardError: it does not. Nothing should be trained then.
        """
        from dflash.compile.proof import prove

        return prove(self)

    # -- for GuardedFunction -------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        wanted = {
            "recompile_limit": self.recompile_limit,
            "fail_on_recompile_limit_hit": True,  # silent eager is worse than an error
        }
        return {k: v for k, v in wanted.items() if hasattr(torch._dynamo.config, k)}

    def _prepare(self) -> None:
        for name, value in self._config().items():
            setattr(torch._dynamo.config, name, value)
        self._prepared.done = True

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not getattr(self._prepared, "done", False):
            self._prepare()
        if self._in_danger():
            with self._count_lock:
                self.intercepted += 1
        return compiled(*args, **kwargs)

    def _in_danger(self) -> bool:
        return any(held_elsewhere(name) for name in WATCHED)

    def _counting(self, label: str, backend: Backend) -> Callable[..., Any]:
        real = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

        @functools.wraps(real)
        def counting(graph: Any, inputs: Any, **kwargs: Any) -> Any:
            if self._sealed:
                raise RecompileError(
                    f"{label} compiles after the warm-up: a shape, mode or dtype was not in it; "
                    "add it to warm_up() or use another guard"
                )
            with self._count_lock:
                self.compiles[label] += 1
            return real(graph, inputs, **kwargs)

        return counting


class GuardedFunction:
    """A compiled function behind a guard; call it like the function.

    Attributes:
        function: the function that was compiled (the copy with its own code).
        label: its name in the guard's counts.
    """

    def __init__(
        self,
        guard: CompileGuard,
        compiled: Callable[..., Any],
        function: Callable[..., Any],
        label: str,
    ) -> None:
        self._guard = guard
        self._compiled = compiled
        self.function = function
        self.label = label

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._guard._call(self._compiled, args, kwargs)


class ThreadLocalGuard(CompileGuard):
    """Shared state made per thread where it is read."""

    name = "thread-local"
    needs = tuple(row.name for row in STATES)

    @classmethod
    def available(cls) -> str | None:
        try:
            for row in STATES:
                patch = row.patch()
                if patch is not None:
                    patch.install()
                    patch.remove()
        except StateError as error:
            return str(error)
        return None

    def _explain(self, made: list[str]) -> str:
        return f"made per thread: {', '.join(made) or 'nothing, this torch does it all itself'}"


class ForceCompileGuard(CompileGuard):
    """torch's own switch, set in each thread."""

    name = "force-compile"
    needs = tuple(row.name for row in STATES if row.name not in ("fx-tracing-flag", "compile-session"))

    @classmethod
    def available(cls) -> str | None:
        if not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"):
            return f"torch {torch.__version__} has no force_compile_during_fx_trace (2.11 has)"
        return None

    def _explain(self, made: list[str]) -> str:
        also = f"; made per thread: {', '.join(made)}" if made else ""
        return f"force_compile_during_fx_trace is set in each calling thread{also}"

    def _config(self) -> dict[str, Any]:
        return super()._config() | {"force_compile_during_fx_trace": True}

    def _in_danger(self) -> bool:
        return _raw_fx_flag() and not _this_thread_traces()

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _raw_fx_flag() and _this_thread_traces():
            # A genuine nested trace: torch shall judge it as it would without the guard.
            with torch._dynamo.config.patch(force_compile_during_fx_trace=False):
                return compiled(*args, **kwargs)
        return super()._call(compiled, args, kwargs)


class SerialGuard(CompileGuard):
    """Compile everything first; afterwards a compile is an error."""

    name = "serial"
    # Warm code still annotates and reads metrics; it must not meet another thread's.
    needs = ("traceback-meta", "metrics-context", "cuda-device-guard")

    def _explain(self, made: list[str]) -> str:
        return "everything compiles in warm_up(), one after the other; a later compile is an error"

    def warm_up(self, tasks: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        compiled = super().warm_up(tasks)
        self._sealed = True
        return compiled

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._sealed and threading.current_thread() is not threading.main_thread():
            raise GuardError(
                "the guard 'serial' was not warmed up: call warm_up() before the threads start"
            )
        return super()._call(compiled, args, kwargs)


class LockGuard(CompileGuard):
    """One lock round every call and backward."""

    name = "lock"

    def __init__(self, *, recompile_limit: int) -> None:
        super().__init__(recompile_limit=recompile_limit)
        self.lock = threading.RLock()
        self._in_backward = False

    def _explain(self, made: list[str]) -> str:
        return "one lock round every compiled call and every region(); nothing overlaps"

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
        # Engine threads are not Python's; and only one backward can be under way.
        if self._in_backward and isinstance(threading.current_thread(), threading._DummyThread):
            return super()._call(compiled, args, kwargs)
        with self.lock:
            return super()._call(compiled, args, kwargs)


_CLASSES: dict[str, type[CompileGuard]] = {
    cls.name: cls for cls in (ThreadLocalGuard, ForceCompileGuard, SerialGuard, LockGuard)
}
GUARDS: tuple[str, ...] = ("auto", *_CLASSES)


def compile_guard(name: str = "auto", *, recompile_limit: int = 64) -> CompileGuard:
    """The guard called ``name``, to be entered before any thread compiles.

    Args:
        name: one of :data:`GUARDS`.
        recompile_limit: compiled entries per function; one more is an error.

    Raises:
        GuardError: unknown name, a limit below 1, or not to be had on this torch.
        UnsupportedTorch: torch outside the supported range.
    """
    require_supported()
    if recompile_limit < 1:
        raise GuardError(f"recompile_limit must be at least 1, not {recompile_limit}")
    if name == "auto":
        reasons = []
        for cls in (ThreadLocalGuard, ForceCompileGuard, SerialGuard):
            why_not = cls.available()
            if why_not is None:
                return cls(recompile_limit=recompile_limit)
            reasons.append(why_not)
        raise GuardError("no guard works on this torch: " + "; ".join(reasons))
    if name not in _CLASSES:
        raise GuardError(f"unknown guard {name!r}: use one of {', '.join(GUARDS)}")
    why_not = _CLASSES[name].available()
    if why_not is not None:
        raise GuardError(f"the guard {name!r} cannot be had: {why_not}")
    return _CLASSES[name](recompile_limit=recompile_limit)


def with_own_code(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """A copy of a plain function with a code object of its own; other callables as they are.

    Dynamo keeps compiled entries by code object: every wrapper of one function, in every thread,
    shares one list and one recompile limit.
    """
    if type(function) is not types.FunctionType:
        return function
    safe = "".join(c if c.isalnum() else "_" for c in label)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}__{safe}")
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__doc__ = function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy


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
