"""``torch.compile`` from several threads of one process, made safe. Imports nothing but torch.

::

    from dflash.compile import compile_guard

    with compile_guard("auto", recompile_limit=64) as guard:   # before the threads start
        attend = guard.compile(flex_attention, label="drafter-0")   # one per thread
        ...                                                          # start the threads
        with guard.region():                                         # round each backward()
            loss.backward()

See :mod:`dflash.compile.guard` for the guards by name and what each costs, and
:mod:`dflash.compile.base` for what all of them do.
"""

from dflash.compile.guard import (
    GUARDS,
    CompileGuard,
    GuardedFunction,
    GuardError,
    RecompileError,
    compile_guard,
)
from dflash.compile.thread_state import StateError
from dflash.compile.versions import UnsupportedTorch, supported_range

__all__ = [
    "GUARDS",
    "CompileGuard",
    "GuardError",
    "GuardedFunction",
    "RecompileError",
    "StateError",
    "UnsupportedTorch",
    "compile_guard",
    "supported_range",
]
