"""One probe: what it reads, and how its value is compared with the value at rest.

A probe never imports the module that it reads: a bystander that imports torch's lazy modules
would change what it looks at. A module that nobody has loaded yet holds no state, which is
:data:`NOT_LOADED` and counts as at rest.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PROCESS, THREAD = "process", "thread"
_SHOWN = 200  # characters of a value in a report
_log = logging.getLogger("harness.probes")
_told: set[str] = set()


class _Word:
    """A value that is no value; compared by identity."""

    def __init__(self, word: str) -> None:
        self._word = word

    def __repr__(self) -> str:
        return self._word


UNKNOWN = _Word("unknown")
NOT_LOADED = _Word("not loaded")
SAVED = _Word("as it was saved")


@dataclass(frozen=True)
class Probe:
    """One row.

    Attributes:
        name: short and stable; reports and baselines use it.
        where: dotted place of the state.
        read: returns the value; raises AttributeError where this torch does not have it.
        scope: :data:`PROCESS` or :data:`THREAD` (value of the reading thread).
        source: public report or change that explains the state.
        versions: torch versions that have it: ``all`` (2.9 to 2.15), ``2.13+`` or ``to 2.13``.
        module: module that holds it ("" for C++ and the environment).
        rest: value at rest, where it is not simply what :func:`rest_values` saved.
        core: read at every entry into a compiled function.
        sampled: cheap and harmless enough to be read by a bystander while threads compile.
        by_identity: rest is the object saved by :func:`rest_values`, not an equal one.
        grows: a cache, a counter or a left-over by design: shown, never judged.
        matters: asked when a value is judged: whether this torch, with its settings, looks at the
            state at all. Where it does not, the value is shown and not judged.
    """

    name: str
    where: str
    read: Callable[[], Any]
    scope: str
    source: str
    versions: str = "all"
    module: str = ""
    rest: Any = SAVED
    core: bool = False
    sampled: bool = True
    by_identity: bool = False
    grows: bool = False
    matters: Callable[[], bool] | None = None

    @property
    def judged(self) -> bool:
        """Whether a value that is not at rest is a finding, here and now."""
        return not self.grows and (self.matters is None or self.matters())

    def promised(self, torch_version: str) -> bool:
        """Whether a torch of this version should have the state."""
        installed = _major_minor(torch_version)
        if self.versions.endswith("+"):
            return installed >= _major_minor(self.versions[:-1])
        if self.versions.startswith("to "):
            return installed <= _major_minor(self.versions[3:])
        return True


def read(probe: Probe) -> Any:
    """The probe's value now, :data:`NOT_LOADED`, or :data:`UNKNOWN` where it cannot be read.

    Never raises. A value that the installed version should have and that cannot be read is
    logged as a warning, once per process.
    """
    if probe.module and probe.module not in sys.modules:
        return NOT_LOADED
    try:
        return probe.read()
    except Exception as error:  # whatever a future torch makes of it
        _tell_once(probe, error)
        return UNKNOWN


def at_rest(probe: Probe, value: Any, rest: Mapping[str, Any]) -> bool | None:
    """Whether ``value`` is the rest value; None when that is unknown, or the row is not judged."""
    if not probe.judged:
        return None
    return _same(probe, value, rest)


def changed(probe: Probe, value: Any, rest: Mapping[str, Any]) -> bool:
    """Whether ``value`` is known not to be the rest value, also for rows that grow."""
    return _same(probe, value, rest) is False


def show(value: Any) -> str:
    """A short form for reports; functions by code object, because names can lie."""
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    try:
        text = repr(value)
    except Exception as error:  # another thread's fake tensors, say
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _same(probe: Probe, value: Any, rest: Mapping[str, Any]) -> bool | None:
    expected = rest[probe.name]
    if value is UNKNOWN or expected is UNKNOWN:
        return None
    if value is expected or value is NOT_LOADED:
        return True
    if expected is NOT_LOADED:  # loaded since: only a declared rest value can tell
        if probe.rest is SAVED:
            return None
        expected = probe.rest
    return bool(value is expected if probe.by_identity else value == expected)


def _tell_once(probe: Probe, error: Exception) -> None:
    if probe.name in _told:
        return
    _told.add(probe.name)
    import torch

    version = str(torch.__version__)
    if probe.promised(version):
        _log.warning(
            "torch %s: probe %s (%s) cannot be read, its state is unknown: %s: %s",
            version,
            probe.name,
            probe.where,
            type(error).__name__,
            error,
        )


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
