"""Tracebacks as data: which frame of torch raised, and which were only passed through.

A traceback of a compile failure shows ``compile_wrapper`` whether it raised or merely called the
function that did. A reader who greps for the function's name cannot tell the two apart, so every
frame here carries its role. Not covered: C++ frames, and threads that did not raise (see the
faulthandler dump of the case for those).
"""

from __future__ import annotations

import linecache
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from types import TracebackType
from typing import Any

RAISED = "raised here"
PASSED = "passed through"

# The frames that a diagnosis of a compile race is about; the others are kept but not shown first.
_CENTRAL = (
    "/torch/_dynamo/eval_frame.py",
    "/torch/_dynamo/convert_frame.py",
    "/torch/fx/_symbolic_trace.py",
    "/torch/fx/traceback.py",
    "/torch/fx/experimental/proxy_tensor.py",
)


@dataclass(frozen=True)
class Frame:
    """One frame of a traceback.

    Attributes:
        file: path as the interpreter knows it.
        line: line number in ``file``.
        function: name of the function.
        source: that source line, stripped ("" where it cannot be read).
        role: :data:`RAISED` for the frame that raised, else :data:`PASSED`.
        central: whether the frame belongs to eval_frame, convert_frame or FX.
    """

    file: str
    line: int
    function: str
    source: str
    role: str
    central: bool

    def short(self) -> str:
        """``torch/_dynamo/eval_frame.py:1120 compile_wrapper``."""
        return f"{shorten(self.file)}:{self.line} {self.function}"


@dataclass(frozen=True)
class CapturedError:
    """An exception of one thread, with the exceptions that it hides behind it.

    Attributes:
        type: qualified name of the exception's class.
        message: its text.
        frames: outermost first; the last one raised.
        causes: the chain of ``__cause__`` / ``__context__``, nearest first.
        text: the traceback as Python prints it.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]
    causes: tuple[CapturedError, ...] = ()
    text: str = field(default="", repr=False)

    @property
    def raising(self) -> Frame | None:
        """The frame that raised, or None when the traceback is empty."""
        return self.frames[-1] if self.frames else None

    def central_frames(self) -> tuple[Frame, ...]:
        """The eval_frame, convert_frame and FX frames, outermost first."""
        return tuple(frame for frame in self.frames if frame.central)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self)


def shorten(file: str) -> str:
    """The path from the package on: ``.../site-packages/torch/x.py`` -> ``torch/x.py``."""
    parts = PurePath(file.lstrip("/")).parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    return "/".join(parts[-3:])


def capture_error(error: BaseException) -> CapturedError:
    """Turns ``error`` and its chain into data.

    Dynamo and the AOT stage wrap an exception in their own (``BackendCompilerFailed`` and the
    like); the chain is kept, so the first cause can be judged as well as the last word.
    """
    text = "".join(traceback.format_exception(error))
    chain: list[BaseException] = []
    seen = {id(error)}
    nxt = _behind(error)
    while nxt is not None and id(nxt) not in seen:
        seen.add(id(nxt))
        chain.append(nxt)
        nxt = _behind(nxt)
    return CapturedError(
        type=_name(error),
        message=message_of(error),
        frames=_frames(error.__traceback__),
        causes=tuple(
            CapturedError(_name(cause), message_of(cause), _frames(cause.__traceback__))
            for cause in chain
        ),
        text=text,
    )


def stack_of(frame: Any) -> tuple[Frame, ...]:
    """The live stack that ends in ``frame`` (outermost first), for a thread that still runs."""
    entries = traceback.walk_stack(frame)
    frames = [_frame(f, line, PASSED) for f, line in entries]
    return tuple(reversed(frames))


def _frames(tb: TracebackType | None) -> tuple[Frame, ...]:
    walked = list(traceback.walk_tb(tb))
    last = len(walked) - 1
    return tuple(
        _frame(f, line, RAISED if index == last else PASSED)
        for index, (f, line) in enumerate(walked)
    )


def _frame(frame: Any, line: int, role: str) -> Frame:
    file = frame.f_code.co_filename
    return Frame(
        file=file,
        line=line,
        function=frame.f_code.co_name,
        source=linecache.getline(file, line, frame.f_globals).strip(),
        role=role,
        central=f"/{file}".endswith(_CENTRAL),
    )


def _behind(error: BaseException) -> BaseException | None:
    """The nearest hidden exception, also one that ``raise ... from None`` keeps out of sight."""
    return error.__context__ if error.__cause__ is None else error.__cause__


def message_of(error: BaseException) -> str:
    """Its text; never raises."""
    try:
        return str(error)
    except Exception as second:  # a thread must not lose its outcome to a broken __str__
        return f"<str() of it raised {type(second).__name__}>"


def _name(error: BaseException) -> str:
    cls = type(error)
    builtin = cls.__module__ == "builtins"
    return cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
