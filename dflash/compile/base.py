"""What every guard does, and the function that it hands out.

Each compiled function has its own code object (so its own cache and its own recompile limit),
dynamo's per-thread configuration is set in each thread that calls, compiles are counted, and a
hit recompile limit is an error instead of a silent fall to eager.

What an autograd engine thread (CUDA backward) sees: values at rest, and its own configuration.
The limits given to ``torch.compile`` itself (torch >= 2.13) hold there too; a compiled call made
from there goes through :class:`GuardedFunction` like any other and sets the rest on arrival.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch._dynamo

from dflash.compile.own_code import with_own_code
from dflash.compile.states import STATES, WATCHED, SharedState
from dflash.compile.thread_state import StateError, held_elsewhere

Backend = str | Callable[..., Any]

PROOF_LABEL = "guard.prove"


class GuardError(RuntimeError):
    """The guard cannot be had, or does not do what it should; one line says what to do."""


class RecompileError(GuardError):
    """Something compiled after the serial warm-up was over."""


class CompileGuard:
    """Base of the guards by name; get one from :func:`dflash.compile.guard.compile_guard`.

    One guard is in force at a time in a process; its functions work only while it is.

    Attributes:
        name: the guard in force (never ``auto``).
        explanation: one line: what was chosen and why.
        compiles: label -> number of graphs that went to a backend.
        intercepted: compiled calls that began while another thread held tracing state. On a
            torch that keeps all of it per thread already there is nothing to count.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()  # rows of STATES that this guard makes per thread
    likes: ClassVar[tuple[str, ...]] = ()  # rows that it does without where they cannot be had

    _in_force: ClassVar[CompileGuard | None] = None
    _entering: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, recompile_limit: int, passed_over: Sequence[str] = ()) -> None:
        self.recompile_limit = recompile_limit
        self.explanation = ""
        self.compiles: Counter[str] = Counter()
        self.intercepted = 0
        self._passed_over = passed_over
        self._count_lock = threading.Lock()
        # As torch's configuration: per thread, and per context where that is a ContextVar.
        self._prepared = ContextVar("dflash_compile_prepared", default=False)
        self._stack = contextlib.ExitStack()
        self._sealed = False

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> CompileGuard:
        with CompileGuard._entering:
            if CompileGuard._in_force is not None:
                raise GuardError(
                    f"the guard {CompileGuard._in_force.name!r} is in force in this process: "
                    "leave it before another one is entered"
                )
            CompileGuard._in_force = self
        self._stack.callback(self._leave)
        self._sealed = False
        try:
            rows = [row for row in STATES if self._wants(row) and self._install(row)]
            self._enter()
            self._stack.enter_context(self.thread())
        except BaseException:
            self._stack.close()
            raise
        made = [row.name for row in rows if not row.instead]
        also = [row.instead for row in rows if row.instead]
        self.explanation = "; ".join(
            [f"{self.name}: {self._explain(made)}", *also, *self._passed_over]
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _leave(self) -> None:
        CompileGuard._in_force = None

    @classmethod
    def available(cls) -> str | None:
        """None where this guard works on the installed torch, else why it does not."""
        if CompileGuard._in_force is not None:
            return None  # the states are not what they are at rest; __enter__ refuses
        try:
            for row in STATES:
                if row.name in cls.needs and (patch := row.patch()) is not None:
                    patch.check()
        except StateError as error:
            return str(error)
        return None

    def _wants(self, row: SharedState) -> bool:
        return row.name in self.needs or row.name in self.likes

    def _install(self, row: SharedState) -> bool:
        patch = row.patch()
        if patch is None:
            return False
        try:
            patch.install()
        except StateError:
            if row.name in self.needs:
                raise
            return False
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
            function: a function, a module or another callable; it gets its own code, so its own
                cache (:mod:`dflash.compile.own_code`).
            label: name in :attr:`compiles`, where equal labels add up; default: the function's
                name.
            backend: dynamo backend by name, or a callable.
            dynamic: as in ``torch.compile``.
            fullgraph: as in ``torch.compile``. Before 2.15 torch counts the frames of such a
                call for the whole process, which no guard but ``lock`` repairs: beside other
                threads a call may raise a false "found no compiled frames".
        """
        label = label or str(getattr(function, "__name__", type(function).__name__))
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
        prepared = self._prepared.get()
        try:
            self._prepare()
            yield
        finally:
            for name, value in saved.items():
                setattr(config, name, value)
            self._prepared.set(prepared)

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

        The counts are afterwards as they were.

        Raises:
            GuardError: it does not. Nothing should be trained then.
        """
        from dflash.compile.proof import prove

        intercepted = self.intercepted
        try:
            return prove(self)
        finally:
            self.compiles.pop(PROOF_LABEL, None)
            self.intercepted = intercepted

    # -- for GuardedFunction -------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        config = torch._dynamo.config
        wanted = {
            "recompile_limit": self.recompile_limit,
            # The cap over all entries of one code object; 256 unless that is too low.
            "accumulated_recompile_limit": max(
                self.recompile_limit, getattr(config, "accumulated_recompile_limit", 0)
            ),
            "fail_on_recompile_limit_hit": True,  # silent eager is worse than an error
        }
        return {name: value for name, value in wanted.items() if hasattr(config, name)}

    def _prepare(self) -> None:
        for name, value in self._config().items():
            setattr(torch._dynamo.config, name, value)
        self._prepared.set(True)

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._arrive()
        return compiled(*args, **kwargs)

    def _arrive(self) -> None:
        """Before each call, on the thread that calls."""
        if CompileGuard._in_force is not self:
            raise GuardError(
                f"the guard {self.name!r} is not in force: call what it compiled inside its with"
            )
        if not self._prepared.get():
            self._prepare()
        if self._in_danger():
            with self._count_lock:
                self.intercepted += 1

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
        function: what was compiled (with its own code).
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
        if torch.compiler.is_dynamo_compiling():  # inlined into another compiled function
            return self._compiled(*args, **kwargs)
        return self._guard._call(self._compiled, args, kwargs)
