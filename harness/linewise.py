"""Every line of chosen source files as a switch point, for a search that knows no names.

A point is written ``torch/fx/_symbolic_trace.py:1226``, and ``torch/fx/_symbolic_trace.py:*`` in
a control's points means every line of that file. Only threads that start while it is open see
them (a crew's do), by ``sys.settrace``; frames of other files are left after their first call
event. It is slow where the files are busy: choose few.

Not covered: what happens inside one line, in C, or in a thread that sets a trace function of its
own (a debugger, coverage); line numbers move between releases, so a schedule of lines is for one
version only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any


def is_line_pattern(point: str) -> bool:
    """Whether ``point`` names lines of a file: ``some/file.py:12``, ``some/file.py:*``."""
    file, _, line = point.rpartition(":")
    return file.endswith(".py") and bool(line) and "@" not in point


class Lines:
    """Context manager; without a pattern it does nothing.

    Args:
        points: of a control; those that are no line patterns are left out.
        arrive: called in the thread that is about to run a line, with the line's name.
    """

    def __init__(self, points: Iterable[str], arrive: Callable[[str], None]) -> None:
        self._files = tuple(point.rpartition(":")[0] for point in points if is_line_pattern(point))
        self._arrive = arrive
        self._names: dict[str, str | None] = {}  # file -> how the points write it, if one does
        self._open = False
        self._before: Any = None

    def __enter__(self) -> Lines:
        if self._files:
            self._open = True
            self._before = threading.gettrace()
            threading.settrace(self._on_call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._files:
            self._open = False
            threading.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._open:
            sys.settrace(None)
            return None
        file = frame.f_code.co_filename  # not the code: equal code may stand in two files
        if file not in self._names:
            self._names[file] = self._name(file)
        return None if self._names[file] is None else self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and self._open:
            self._arrive(f"{self._names[frame.f_code.co_filename]}:{frame.f_lineno}")
        return self._on_line

    def _name(self, file: str) -> str | None:
        """The file as the points write it: by the end of its path."""
        parts = PurePath(file).parts
        for pattern in self._files:
            ends = "/".join(parts[-len(PurePath(pattern).parts) :])
            if fnmatchcase(ends, pattern):
                return ends
        return None
