"""Two threads that are the first to touch torch's compile stack, in a process that is cold.

While the first thread is inside ``torch._dynamo``, the second gets into ``torch._dynamo.utils`` by
way of ``torch._inductor``, and each waits for the module that the other one holds. Python breaks
that deadlock: one thread is given half a module and fails, which takes it from the other one.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import threading
from typing import Any

PATIENCE = 60.0
HELD_IN = "torch._dynamo.aot_compile"  # the first module that torch._dynamo imports
RELEASED_IN = "torch._dynamo.utils"  # which both need, and which needs torch._dynamo
FIRST, SECOND = "torch._dynamo", "torch._inductor.compile_fx"


class _Gate:
    """Stands in for ``__import__``, before any lock: holds the first thread for the second."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.missed = "the first thread was never held"
        self._import = builtins.__import__

    def __enter__(self) -> _Gate:
        builtins.__import__ = self._watched
        return self

    def __exit__(self, *_: object) -> None:
        builtins.__import__ = self._import

    def _watched(self, name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        thread, inside = threading.current_thread().name, (globals or {}).get("__name__")
        if thread == "toucher-0" and inside == HELD_IN and not self.reached.is_set():
            self.reached.set()
            self.missed = "" if self.released.wait(PATIENCE) else "the second did not get there"
        elif thread == "toucher-1" and inside == RELEASED_IN:
            self.released.set()
        return self._import(name, globals, *rest, **more)


def touch(*, overlap: bool, before: str) -> dict[str, Any]:
    """A record with one outcome per thread; ``before`` is imported in the main thread first."""
    importlib.import_module(before)
    from harness.crew import Crew, Member

    gate = _Gate()
    crew = Crew(2, start="together" if overlap else "staggered", deadline=3 * PATIENCE,
                after_step=0, name="toucher")  # fmt: skip

    def work(member: Member) -> None:
        with member.step(0):
            if overlap and member.index == 1:
                gate.reached.wait(PATIENCE)
            elif not overlap:
                gate.released.set()
            importlib.import_module((FIRST, SECOND)[member.index])
        gate.reached.set()

    with gate:
        outcomes = crew.run(work)
    return {
        "outcomes": [outcome.as_dict() for outcome in outcomes],
        "script": {"missed": gate.missed or None} if overlap else {},
        "touched": [name for name in (FIRST, SECOND) if name in sys.modules],
        "later": _compile_later(),
    }


def _compile_later() -> str:
    """What a compile says when everybody has ended: "" or its exception."""
    import torch

    try:
        torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
