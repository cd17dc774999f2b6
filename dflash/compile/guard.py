"""The compile guard: lets several threads call ``torch.compile``d functions in one process.

=================  ===============================================================================
``thread-local``   every piece of shared tracing state that this torch has is made per thread
                   where it is read (:mod:`dflash.compile.states`). Warm calls run while others
                   compile. Cost: some attribute reads per call.
``force-compile``  the wrapper's FX check is switched off by torch's own
                   ``force_compile_during_fx_trace``, in every thread; the other states as above,
                   but for the compile session: eager optimizers that step while another thread
                   compiles take their traced branch. Needs torch >= 2.11.
``serial``         everything is compiled in :meth:`CompileGuard.warm_up`, one thunk after the
                   other; then any compile is an error. Cost: start-up is the sum of all compiles.
``lock``           one lock round every compiled call and every backward; metadata per thread where
                   that can be had, for the eager code outside. Cost: a warm step waits for
                   whoever compiles, and no two calls overlap.
``auto``           ``thread-local`` where it can be installed, else ``force-compile``, else
                   ``lock``; :attr:`CompileGuard.explanation` says which and why.
=================  ===============================================================================

All of them make FX traces of different threads wait for one another
(:mod:`dflash.compile.one_trace`). What they do besides: :mod:`dflash.compile.base`.

Correct single-thread behaviour stays: a genuine FX trace over a compiled function, on the thread
that traces, still gets torch's error.

Enter the guard in one thread, before the others start; leave it after they have ended. One guard
is in force at a time.
"""

from __future__ import annotations

from dflash.compile.base import CompileGuard, GuardedFunction, GuardError, RecompileError
from dflash.compile.strategies import ForceCompileGuard, LockGuard, SerialGuard, ThreadLocalGuard
from dflash.compile.versions import require_supported

__all__ = [
    "GUARDS",
    "CompileGuard",
    "ForceCompileGuard",
    "GuardError",
    "GuardedFunction",
    "LockGuard",
    "RecompileError",
    "SerialGuard",
    "ThreadLocalGuard",
    "compile_guard",
]

_CLASSES: dict[str, type[CompileGuard]] = {
    cls.name: cls for cls in (ThreadLocalGuard, ForceCompileGuard, SerialGuard, LockGuard)
}
_AUTO = ("thread-local", "force-compile", "lock")  # in this order; ``serial`` needs a warm-up
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
    if name not in GUARDS:
        raise GuardError(f"unknown guard {name!r}: use one of {', '.join(GUARDS)}")
    if recompile_limit < 1:
        raise GuardError(f"recompile_limit must be at least 1, not {recompile_limit}")
    reasons: list[str] = []
    for candidate in _AUTO if name == "auto" else (name,):
        why_not = _CLASSES[candidate].available()
        if why_not is None:
            return _CLASSES[candidate](recompile_limit=recompile_limit, passed_over=reasons)
        reasons.append(f"not {candidate}: {why_not}")
    raise GuardError(f"no guard to be had on this torch: {'; '.join(reasons)}")
