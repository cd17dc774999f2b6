"""Where in a log something may stand: one native search for all literals at once.

A log of gigabytes holds a few kilobytes that matter. The literals here, and those of the rules,
mark them; only what lies round a hit is parsed. The same literals, as an extended regular
expression, are what ``harness triage --grep`` prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ahocorasick_rs import BytesAhoCorasick, MatchKind

# Bytes round a hit that are parsed: the line before often names the thread, a message goes on.
BACK, FORWARD = 700, 2000
# A dump of stacks goes on for long, and its frames have no literal of their own.
FORWARD_OF_DUMPS = 48_000

# The search uses vector instructions up to this many literals; two such searches are several
# times faster than one over all.
VECTOR_LITERALS = 60

_FRAMES = ('", line ', "Traceback (most recent call", "Traceback for thread")
_DUMPS = ("Thread 0x", " (idle", " (active", "Fatal Python error", "Python v3.", "Timeout (0:")
_EXCEPTIONS = ("Error", "Exception", "KeyboardInterrupt", "SystemExit")
_NATIVE = (
    "terminate called", "what():", "frame #", "Watchdog", "watchdog", "CUDA error", "ut of memory",
    "oom-kill", "oom_kill", "OOMKilled", "oom_reaper", "Killed", "Segmentation fault", "Bus error",
    "Aborted", "Terminated", "Illegal instruction", "core dumped", "SIGKILL", "SIGTERM", "SIGSEGV",
    "SIGABRT", "SIGBUS", "by signal", "CANCELLED AT", "exitcode", "Root Cause (first",
    "Assertion `", "device-side assert",
)  # fmt: skip
BASE = (*_FRAMES, *_DUMPS, *_EXCEPTIONS, *_NATIVE)


@dataclass(frozen=True)
class Needles:
    """The literals of one triage.

    Attributes:
        literals: none of them holds another one.
        forward: bytes after a hit that are parsed, for each literal.
    """

    literals: tuple[str, ...]
    forward: tuple[int, ...]
    _searches: tuple[tuple[int, BytesAhoCorasick], ...]

    def hits(self, data: bytes) -> list[tuple[int, int]]:
        """(first byte, bytes to parse from there), in order."""
        found = []
        for first, search in self._searches:
            forward = self.forward
            found += [
                (start, forward[first + index])
                for index, start, _ in search.find_matches_as_indexes(data)
            ]
        if len(self._searches) > 1:
            found.sort()
        return found

    def grep(self) -> str:
        """The equivalent extended regular expression."""
        return "|".join(map(escaped, self.literals))


def escaped(text: str) -> str:
    """The text as an extended regular expression within single quotes of a shell."""
    return re.sub(r"([][().*+?{}|^$\\])", r"\\\1", text).replace("'", ".")


def needles(more: Iterable[str] = ()) -> Needles:
    """The literals of this module and ``more`` (those of the rules)."""
    return _needles(tuple(sorted(set(more))))


@lru_cache(maxsize=4)
def _needles(more: tuple[str, ...]) -> Needles:
    wanted = list(dict.fromkeys([*BASE, *more]))
    kept = [text for text in wanted if not any(o != text and o in text for o in wanted)]
    kept.sort()
    # Of equal size: the search of a few literals looks for single bytes, which are everywhere.
    size = -(-len(kept) // -(-len(kept) // VECTOR_LITERALS))
    parts = [(at, kept[at : at + size]) for at in range(0, len(kept), size)]
    return Needles(
        tuple(kept),
        tuple(FORWARD_OF_DUMPS if text in _DUMPS else FORWARD for text in kept),
        tuple(
            (at, BytesAhoCorasick([t.encode() for t in part], matchkind=MatchKind.LeftmostFirst))
            for at, part in parts
        ),
    )
