"""Lets one thread at a time trace, so that no trace puts back what another one has patched.

An FX trace patches ``nn.Module`` for the whole process and keeps its patches, its tracer and (up to
torch 2.13) its flag in variables of the process, each saved and put back by hand. torch.compile
traces while it holds dynamo's lock. ``make_fx``, ``symbolic_trace`` and ``torch.export`` take no
lock, so one of them in another thread, beside a compile, puts back what is not its own: one of the
two dies of ``CURRENT_PATCHER``, or nobody does and ``nn.Module`` stays patched. Then every later
``torch.compile`` of a module captures no graph and runs eager, without a word.

Here such a trace takes dynamo's lock too: it waits for a compile under way, and compiles wait for
it. Warm compiled calls take no lock and wait for nobody.

Not covered: an eager module that another thread calls during a trace goes through the trace's
patches (pytorch#187589). That is harmless beside torch.compile's own traces and ``make_fx``; a
plain ``symbolic_trace`` takes the module for one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.convert_frame as convert_frame
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor

from dflash.compile.thread_state import StateError

PATIENCE = 600.0  # seconds; a trace that waits for a compile that waits for the trace is a deadlock


class OneTraceAtATime:
    """A patch: every FX trace of the process takes dynamo's ``compile_lock``.

    Args:
        patience: seconds that a trace waits for the lock before it raises ``StateError``.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._undo: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raises :class:`StateError` where :meth:`install` would; changes nothing."""
        self._places()

    def install(self) -> None:
        """Puts the lock round the three places where a trace touches the process's state.

        Raises:
            StateError: this torch has not one of them.
        """
        for owner, name, lock_round in self._places():
            real = vars(owner)[name]
            self._undo.append(functools.partial(setattr, owner, name, real))
            setattr(owner, name, lock_round(real))

    def remove(self) -> None:
        """Puts torch's own functions back."""
        while self._undo:
            self._undo.pop()()

    def _places(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        places: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (torch.fx.Tracer, "trace", self._function),
            # make_fx registers its tracer before it traces.
            (proxy_tensor._MakefxTracer, "_trace_inner", self._function),
            # A compile takes the patches of a trace under way off, and puts them back at its end.
            (symbolic_trace, "_maybe_revert_all_patches", self._context),
        ]
        for owner, name, _ in places:
            if name not in vars(owner):
                raise StateError(
                    f"torch {torch.__version__} has no {owner.__name__}.{name}, so FX traces "
                    "cannot be kept apart"
                )
        return places

    def _function(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            with self._alone():
                return real(*args, **kwargs)

        return one_at_a_time

    def _context(self, real: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(real)
        @contextlib.contextmanager
        def one_at_a_time() -> Iterator[Any]:
            with self._alone(), real() as value:
                yield value

        return one_at_a_time

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        lock = convert_frame.compile_lock  # looked up each time: tools put their own in its place
        if not lock.acquire(timeout=self.patience):
            raise StateError(
                f"an FX trace in {threading.current_thread().name} has waited {self.patience:g} s "
                "for another thread that compiles or traces: let no traced code wait for a thread "
                "that compiles"
            )
        try:
            yield
        finally:
            lock.release()
