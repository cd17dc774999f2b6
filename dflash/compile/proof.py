"""Proves that a guard intercepts, by making the danger real.

A guard that was installed and does nothing looks exactly like one that works, until the run
dies. So: another thread stops in the middle of an FX trace, and meanwhile this thread calls
compiled code. It must neither raise nor fall to eager. Then this thread traces over the compiled
code itself, and torch's own error must come. Nothing here depends on timing: the other thread
waits for an event, with a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dflash.compile.base import PROOF_LABEL, CompileGuard, GuardError, RecompileError
from dflash.compile.strategies import LockGuard, SerialGuard

_DEADLINE = 60.0  # seconds; only a broken guard gets near it


def prove(guard: CompileGuard) -> str:
    """Runs the proof that fits the guard; returns one line, raises :class:`GuardError`."""
    if isinstance(guard, LockGuard):
        return _prove_exclusion(guard)
    if isinstance(guard, SerialGuard):
        return _prove_sealed(guard)
    return _prove_interception(guard)


class _Ran:
    """A backend that counts how often the *compiled* code ran."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.count += 1
            return graph.forward(*args)

        return run


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def _prove_interception(guard: CompileGuard) -> str:
    ran = _Ran()
    compiled = guard.compile(_double, label=PROOF_LABEL, backend=ran)
    x = torch.ones(2)
    compiled(x)
    inside, go_on = threading.Event(), threading.Event()
    failure: list[BaseException] = []

    def traced(y: Any) -> Any:
        inside.set()
        go_on.wait(_DEADLINE)
        return y

    def foreign() -> None:
        try:
            torch.fx.Tracer().trace(traced)
        except BaseException as error:
            failure.append(error)
        finally:
            inside.set()

    thread = threading.Thread(target=foreign, name="dflash-guard-proof", daemon=True)
    thread.start()
    try:
        there = inside.wait(_DEADLINE) and not failure
        before = ran.count
        try:
            if there:
                compiled(x)
        except Exception as error:
            raise GuardError(
                f"the guard {guard.name!r} does not intercept: a compiled call raised while "
                f"another thread was tracing ({error}); use the guard 'lock'"
            ) from error
        if there and ran.count != before + 1:
            raise GuardError(
                f"the guard {guard.name!r} does not intercept: a compiled call ran eager while "
                "another thread was tracing; use the guard 'lock'"
            )
    finally:
        go_on.set()
        thread.join(_DEADLINE)
    if failure or not there or thread.is_alive():
        raise GuardError(f"the proof's own trace failed: {failure or 'it did not end in time'}")
    _prove_own_trace_is_reported(guard, compiled)
    return "proved: a call beside another thread's trace ran compiled; a genuine trace is refused"


def _prove_own_trace_is_reported(guard: CompileGuard, compiled: Callable[..., Any]) -> None:
    try:
        torch.fx.Tracer().trace(lambda y: compiled(y))
    except Exception as error:
        if "symbolically trace" in str(error):
            return
        raise GuardError(f"a genuine FX trace failed for another reason: {error}") from error
    raise GuardError(f"the guard {guard.name!r} hides a genuine FX trace over a compiled function")


def _prove_exclusion(guard: LockGuard) -> str:
    inside, go_on = threading.Event(), threading.Event()

    def parked(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        inside.set()
        go_on.wait(_DEADLINE)
        run: Callable[..., Any] = graph.forward
        return run

    compiled = guard.compile(_double, label=PROOF_LABEL, backend=parked)
    thread = threading.Thread(
        target=compiled, args=(torch.ones(2),), name="dflash-guard-proof", daemon=True
    )
    thread.start()
    try:
        if not inside.wait(_DEADLINE):
            raise GuardError("the proof's own compile did not begin in time")
        if guard.lock.acquire(blocking=False):
            guard.lock.release()
            raise GuardError("the guard 'lock' is not held while another thread compiles")
    finally:
        go_on.set()
        thread.join(_DEADLINE)
    if thread.is_alive():
        raise GuardError("the proof's own compile did not end in time")
    return "proved: while a thread compiles, no other thread gets past the lock"


def _prove_sealed(guard: SerialGuard) -> str:
    compiled = guard.compile(_double, label=PROOF_LABEL, backend="eager")
    sealed, guard._sealed = guard._sealed, True
    try:
        compiled(torch.ones(2))
    except Exception as error:
        chain: BaseException | None = error
        while chain is not None and not isinstance(chain, RecompileError):
            chain = chain.__cause__ or chain.__context__
        if chain is None:
            raise GuardError(f"a compile after the warm-up failed otherwise: {error}") from error
    else:
        raise GuardError("the guard 'serial' let something compile after the warm-up")
    finally:
        guard._sealed = sealed
    return "proved: a compile after the warm-up is an error"
