"""Takes one of torch's own repairs out again, at run time, for negative controls.

A suite on a repaired torch proves with it that its detectors still see the failure. Each row
says which change it takes out and on which versions it has something to do; on a torch without
the repair it does nothing and says so. Use it in an isolated process only.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class UnfixError(ValueError):
    """There is no such unfix."""


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


CATALOGUE: dict[str, Unfix] = {
    row.name: row
    for row in (
        Unfix("session-flag", "pytorch#184614", "2.13", _session_flag),
        Unfix("fx-flag-thread-local", "pytorch#168999", "2.14", _fx_flag_shared),
        Unfix("fx-tracing-flag", "pytorch#184614 and #168999", "2.13", _fx_tracing_flag),
    )
}


def unfix(names: Iterable[str]) -> dict[str, bool]:
    """Applies the named rows; returns for each whether the installed torch had the repair.

    Raises:
        UnfixError: for an unknown name.
    """
    done = {}
    for name in names:
        if name not in CATALOGUE:
            raise UnfixError(f"unknown unfix {name!r}: there are {', '.join(CATALOGUE)}")
        done[name] = CATALOGUE[name].apply()
    return done
