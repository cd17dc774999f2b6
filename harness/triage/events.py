"""What the parsers find in a log, as plain data.

An event is one occurrence: an exception with its frames, a dump of stacks, a native crash, a kill,
a notice. Grouping equal ones and finding causes come later (`groups.py`, `rules.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Text is kept as far as a reader needs it; a log may hold messages of any length.
MESSAGE_CHARACTERS = 4000
FRAMES_KEPT = 200


class Kind(StrEnum):
    """The kinds of event; the value stands in the JSON output."""

    EXCEPTION = "exception"
    FRAMES = "frames"  # frames of a traceback without its beginning and its end
    STACKS = "stacks"  # a dump of living threads: faulthandler, py-spy
    FATAL = "fatal"  # the interpreter's own last words, with stacks
    NATIVE = "native"  # C++: terminate, an error of CUDA or of a c10 library
    WATCHDOG = "watchdog"  # NCCL's
    KILLED = "killed"  # a signal or an exit status that says so
    ERROR = "error"  # a line of level ERROR without an exception: counts when nothing else failed
    NOTICE = "notice"  # a line that a rule may want; no failure by itself


FAILURES = frozenset(Kind) - {Kind.STACKS, Kind.NOTICE}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack.

    Attributes:
        file: path from the package on (``torch/_dynamo/eval_frame.py``), or as it stood.
        line: line number.
        function: name of the function, "" where the log does not say.
        source: the source line, "" where the log does not show it.
    """

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def of_torch(self) -> bool:
        """Whether it lies in the package torch."""
        return self.file.startswith("torch/")

    def short(self) -> str:
        """``torch/_dynamo/eval_frame.py:1024 compile_wrapper``."""
        return f"{self.file}:{self.line} {self.function}".rstrip()


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the input something stands: its name, byte offset, and line number from 1."""

    name: str
    offset: int
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else f"{self.name}@{self.offset}"


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's stack in a dump, outermost frame first.

    Attributes:
        thread: its name, or the id under which the dump lists it.
        state: "idle", "active", "active+gil", "current" or "".
    """

    thread: str
    frames: tuple[Frame, ...]
    state: str = ""


@dataclass(slots=True)
class Event:
    """One occurrence.

    Attributes:
        type: name of the exception's class, or of the signal.
        message: its text, at most :data:`MESSAGE_CHARACTERS`.
        frames: outermost first; for an exception the last one raised.
        causes: the chained exceptions, nearest first.
        stacks: of a dump.
        thread, rank, time: as the log says, else None.
        context: the line before it, which often says who failed.
        whole: whether both ends of the stack are in the text.
        handled: whether the text says that the program dealt with it.
        details: what a summary says of it (exit code, pid ...).
    """

    kind: Kind
    place: Place
    type: str = ""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    causes: tuple[Event, ...] = ()
    stacks: tuple[Stack, ...] = ()
    thread: str | None = None
    rank: str | None = None
    time: str | None = None
    context: str = ""
    whole: bool = False
    handled: bool = False
    compile_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def short_type(self) -> str:
        """``torch._dynamo.exc.Unsupported`` -> ``Unsupported``."""
        return self.type.rpartition(".")[2]

    @property
    def who(self) -> str | None:
        """The thread, else the rank (``rank3``), else the main thread where the stack starts there.

        None when the text does not say.
        """
        if self.thread is not None:
            return self.thread
        if self.rank is not None:
            return f"rank{self.rank}" if self.rank.isdigit() else self.rank
        first = self.frames[0] if self.frames else None
        return "MainThread" if first is not None and first.function == "<module>" else None

    def chain(self) -> tuple[Event, ...]:
        """Itself and everything behind it."""
        return (self, *(deeper for cause in self.causes for deeper in cause.chain()))


_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_TORCH = re.compile(
    r".*[/\\](?=torch[/\\](?:_\w+|ao|autograd|compiler|cuda|distributed|export|func|fx|nn|optim"
    r"|utils|testing)(?:[/\\]|\.py$)|torch[/\\]\w+\.py$)"
)
_PYTHON = re.compile(r".*[/\\]python3\.\d+t?[/\\]")


def shorten(path: str) -> str:
    """The path from the package on, so that equal files of two machines are equal."""
    for pattern in (_PACKAGES, _TORCH):
        found = pattern.match(path)
        if found:
            return path[found.end() :].replace("\\", "/")
    found = _PYTHON.match(path)
    return path[found.end() :].replace("\\", "/") if found else path


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def same_text(text: str) -> str:
    """The text with its numbers and addresses taken out, to recognise a repetition."""
    return _NUMBER.sub("#", text[:400])


def signature(event: Event) -> tuple[Any, ...]:
    """Equal for two occurrences of the same failure, whoever met it and whenever."""
    return (
        event.kind,
        event.type,
        same_text(event.message),
        tuple((frame.file, frame.line, frame.function) for frame in event.frames),
        tuple(signature(cause) for cause in event.causes),
        tuple((stack.thread, stack.frames) for stack in event.stacks),
    )
