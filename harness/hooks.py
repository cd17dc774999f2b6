"""Named points inside torch at which the harness can look or wait, without editing torch.

Installed for the time of one trial only, on functions and methods that are looked up at every
call, and put back in reverse order. A point that this torch does not have is an error naming
the version. Points beside the standard ones are installed when they are asked for, as places
(:mod:`harness.places`).

Not covered: C++ code, and calls that reached a function before the hooks were installed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from harness import places
from harness.points import PLACES, Event, to_install

Listener = Callable[[Event], None]


_EAGER_FLEX = ("setup_compilation_env", "_set_compilation_env")


class HookError(RuntimeError):
    """A point cannot be resolved on the installed torch."""


class _Depth(threading.local):
    """Per thread: nesting of compiled calls, and whether the outermost one has settled."""

    def __init__(self) -> None:
        self.call = 0
        self.trace = 0
        self.settled = True
        self.muted = False
        self.step: int | None = None


class Hooks:
    """Context manager: while it is open, listeners hear of every point.

    Args:
        listeners: called in order in the thread that is at the point. The order matters: the
            one that records stands before the one that makes the thread wait.
        points: further points: names of :data:`harness.points.PLACES`, patterns of them
            (``patch.*``), or places in text form.

    Raises:
        HookError: when it is opened: a point does not exist on this torch.
        ValueError: a name that no point has.
    """

    def __init__(self, *listeners: Listener, points: Iterable[str] = ()) -> None:
        self._listeners = listeners
        self._further = to_install(points)
        self._stack = contextlib.ExitStack()
        self._local = _Depth()
        self._open = False

    def __enter__(self) -> Hooks:
        self._open = True
        try:
            self._install_calls()
            self._install_traces()
            self._install_annotate()
            self._install_flex()
            self._install_lock()
            self._install_places()
        except BaseException:
            self._open = False
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._open = False  # what was compiled meanwhile keeps its wrapper: it falls silent
        self._stack.close()

    def emit(
        self, point: str, error: BaseException | None = None, *, depth: int = 0, what: str = ""
    ) -> None:
        """Tells the listeners that this thread is at ``point``.

        What a listener itself does (a probe that calls compiled code, say) sends no events, and
        nothing does once the hooks are closed.
        """
        local = self._local
        if local.muted or not self._open:
            return
        local.muted = True
        try:
            event = Event(point, threading.current_thread().name, local.step, error, depth, what)
            for listener in self._listeners:
                listener(event)
        finally:
            local.muted = False

    def only(self, listener: Listener) -> Callable[[str], None]:
        """A way to tell one listener alone of a point, under the same silences."""

        def emit(point: str) -> None:
            local = self._local
            if local.muted or not self._open:
                return
            local.muted = True
            try:
                listener(Event(point, threading.current_thread().name, local.step))
            finally:
                local.muted = False

        return emit

    def work_step(self, step: int | None) -> None:
        """Sets the crew member's step, which later events of this thread carry."""
        self._local.step = step

    # -- compiled calls ------------------------------------------------------------------------

    def _install_calls(self) -> None:
        from torch._dynamo import eval_frame

        context = eval_frame._TorchDynamoContext
        self._need(context, "__call__", "compiled functions")
        self._need(eval_frame, "_callback_from_stance", "the wrapper's checks")
        wrap, from_stance = context.__call__, eval_frame._callback_from_stance

        def instrumented_wrap(self_: Any, fn: Any) -> Any:
            compiled = wrap(self_, fn)
            if (
                isinstance(fn, type)
                or not callable(compiled)
                or not hasattr(compiled, "__wrapped__")
            ):
                return compiled  # a class or an OptimizedModule: its call comes back through here
            return self._observed(compiled)

        def checked(callback: Any) -> Any:
            if self._local.call == 1 and not self._local.settled:  # disabled functions come too
                self.emit("call.checked")
                self._settle()
            return from_stance(callback)

        self._patch(context, "__call__", instrumented_wrap)
        self._patch(eval_frame, "_callback_from_stance", checked)

    def _observed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        local = self._local

        @functools.wraps(compiled)
        def observed_call(*args: Any, **kwargs: Any) -> Any:
            local.call += 1
            outermost = local.call == 1
            error: BaseException | None = None
            if outermost:
                local.settled = False
            try:
                if outermost:
                    self.emit("call.arrive")  # a script holds the thread here ...
                    self.emit("call.enter")  # ... so that this is recorded when it goes on
                return compiled(*args, **kwargs)
            except BaseException as caught:
                error = caught
                raise
            finally:
                if outermost:
                    self._settle(error)
                    self.emit("call.exit", error)
                local.call -= 1

        return observed_call

    def _settle(self, error: BaseException | None = None) -> None:
        if not self._local.settled:
            self._local.settled = True
            self.emit("call.settled", error)

    # -- FX traces -----------------------------------------------------------------------------

    def _install_traces(self) -> None:
        import torch
        from torch.fx import Tracer

        self._need(Tracer, "trace", "FX traces")
        trace = Tracer.trace

        @functools.wraps(trace)
        def observed_trace(tracer: Any, root: Any, *args: Any, **kwargs: Any) -> Any:
            local = self._local
            local.trace += 1
            self.emit("trace.begin", depth=local.trace)
            if not isinstance(root, torch.nn.Module):
                root = self._observed_root(root)
            try:
                return trace(tracer, root, *args, **kwargs)
            finally:
                self.emit("trace.left", depth=local.trace)
                local.trace -= 1

        self._patch(Tracer, "trace", observed_trace)

    def _observed_root(self, root: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(root)
        def observed_body(*args: Any, **kwargs: Any) -> Any:
            self.emit("trace.body", depth=self._local.trace)
            try:
                return root(*args, **kwargs)
            finally:
                self.emit("trace.end", depth=self._local.trace)

        return observed_body

    # -- torch.fx.traceback.annotate -----------------------------------------------------------

    def _install_annotate(self) -> None:
        import torch.fx.traceback as fx_traceback
        from torch._dynamo.variables import torch as dynamo_variables

        annotate = getattr(fx_traceback, "annotate", None)
        if annotate is None:
            return  # torch without annotations has no such state either
        self._need(fx_traceback, "copy", "the test inside annotate")
        plain_copy = fx_traceback.copy

        class ObservedCopy:
            """Stands in for the module ``copy``: annotate calls it between test and write."""

            def __getattr__(self_, name: str) -> Any:
                return getattr(plain_copy, name)

            def copy(self_, value: Any) -> Any:
                copied = plain_copy.copy(value)
                if sys._getframe(1).f_code.co_name == "annotate":
                    self.emit("annotate.tested")
                    self.emit("annotate.write")
                return copied

        @contextlib.contextmanager
        @functools.wraps(annotate)
        def observed_annotate(*args: Any, **kwargs: Any) -> Iterator[None]:
            error: BaseException | None = None
            self.emit("annotate.arrive")
            try:
                with annotate(*args, **kwargs):
                    self.emit("annotate.body")
                    try:
                        yield
                    finally:
                        self.emit("annotate.end")
            except BaseException as caught:
                error = caught
                raise
            finally:
                self.emit("annotate.left", error)

        # Dynamo knows the context managers that it can trace by identity.
        known = getattr(dynamo_variables, "supported_ctx_manager_classes", None)
        if isinstance(known, dict) and annotate in known:
            known[observed_annotate] = None
            self._stack.callback(known.pop, observed_annotate, None)
        self._patch(fx_traceback, "copy", ObservedCopy())
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.") and (
                vars(module).get("annotate") is annotate
            ):
                self._patch(module, "annotate", observed_annotate)

    # -- eager flex_attention and the compile lock ---------------------------------------------

    def _install_flex(self) -> None:
        from torch.nn.attention import flex_attention as flex

        # What flex_attention enters before it runs uncompiled; the older name is that of 2.9.
        name = next((n for n in _EAGER_FLEX if hasattr(flex, n)), _EAGER_FLEX[0])
        self._need(flex, name, "eager flex_attention")
        setup = getattr(flex, name)

        @functools.wraps(setup)
        def observed_setup(*args: Any, **kwargs: Any) -> Any:
            self.emit("flex.eager")
            return setup(*args, **kwargs)

        self._patch(flex, name, observed_setup)

    def _install_lock(self) -> None:
        from torch._dynamo import convert_frame

        self._need(convert_frame, "compile_lock", "dynamo's lock")
        lock = _ObservedLock(convert_frame.compile_lock, "compile_lock", self.emit)
        self._patch(convert_frame, "compile_lock", lock)

    # -- further points ------------------------------------------------------------------------

    def _install_places(self) -> None:
        rows: dict[places.Place, Callable[[], None]] = {}
        for name in self._further:
            rows[self._place(name)] = functools.partial(self.emit, name)
        self._stack.callback(self._install_rows(rows).remove)

    @staticmethod
    def _install_rows(rows: dict[places.Place, Callable[[], None]]) -> places.Installed:
        try:
            return places.install(rows)
        except places.PlaceError as error:
            raise HookError(str(error)) from error

    @staticmethod
    def _place(name: str) -> places.Place:
        """The first of a point's places that this torch has."""
        candidates = [places.Place.parse(t) for t in PLACES[name][1]] if name in PLACES else []
        for candidate in candidates[:-1]:
            try:
                places.resolve([candidate])
            except places.PlaceError:
                continue
            return candidate
        return candidates[-1] if candidates else places.Place.parse(name)

    # ------------------------------------------------------------------------------------------

    def _need(self, owner: Any, name: str, what: str) -> None:
        if name not in vars(owner):  # not hasattr: every class can be asked for __call__
            import torch

            inside = f"{owner.__module__}." if isinstance(owner, type) else ""
            raise HookError(
                f"torch {torch.__version__} has no {inside}{owner.__name__}.{name}: "
                f"the harness cannot see {what} on this version"
            )

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        old = vars(owner)[name]
        setattr(owner, name, new)
        self._stack.callback(setattr, owner, name, old)


class _ObservedLock:
    """An RLock that says who waits for it and who holds it."""

    def __init__(self, lock: Any, name: str, emit: Callable[..., None]) -> None:
        self._lock = lock
        self._name = name
        self._emit = emit
        self._depth = 0

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        self._emit("lock.wait", what=self._name)
        taken: bool = self._lock.acquire(*args, **kwargs)
        if taken:
            self._depth += 1  # only the owner comes here
            if self._depth == 1:
                self._emit("lock.held", what=self._name)
        return taken

    def release(self) -> None:
        self._depth -= 1
        outermost = self._depth == 0
        self._lock.release()
        if outermost:
            self._emit("lock.released", what=self._name)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)
