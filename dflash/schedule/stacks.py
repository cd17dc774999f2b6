"""The Python stacks of all threads, as text."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks() -> str:
    """The Python stack of every thread, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}\n")
        parts.extend(traceback.format_stack(frame))
        parts.append("\n")
    return "".join(parts)
