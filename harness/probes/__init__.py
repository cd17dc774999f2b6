"""The catalogue of compile state that one thread sees of another: what to read, its rest value.

Each row names a piece of state, where it lives, what it is when nothing compiles, and whether
the value belongs to the process or to the reading thread (:mod:`harness.probes.catalogue`). Some
rows *grow*: caches, counters, what the last compile left. They are shown and never judged. All
others must be back at rest once everybody has stopped.

A probe that this torch does not have is *unknown*: that is said once where the versions promise
it, is shown, and is never taken for "at rest". Values that are compared by identity are compared
with what was saved when :func:`rest_values` was called, before anything compiled;
``functools.wraps`` makes a patched method look right by name.

Not covered: state in C++ without a Python reader, and what lies on disk.
"""

from harness.probes.canaries import (
    CANARIES,
    cache_entries,
    canary_eager_linear,
    canary_fresh_compile,
    run_canaries,
)
from harness.probes.catalogue import CATALOGUE, audit, by_name, load_all, rest_values
from harness.probes.probe import (
    NOT_LOADED,
    PROCESS,
    THREAD,
    UNKNOWN,
    Probe,
    at_rest,
    changed,
    read,
    show,
)

__all__ = [
    "CANARIES",
    "CATALOGUE",
    "NOT_LOADED",
    "PROCESS",
    "THREAD",
    "UNKNOWN",
    "Probe",
    "at_rest",
    "audit",
    "by_name",
    "cache_entries",
    "canary_eager_linear",
    "canary_fresh_compile",
    "changed",
    "load_all",
    "read",
    "rest_values",
    "run_canaries",
    "show",
]
