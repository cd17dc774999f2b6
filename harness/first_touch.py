"""Import-time races: a cold process in which several threads are the first to touch modules.

torch imports most of its compile stack when it is first used. Two threads that do so at once can
meet each other's half-imported modules: Python breaks the deadlock of two imports that wait for
each other by letting one see an unfinished module. Run :func:`first_touch` in a process that has
not imported what it touches (``Isolation(preload=())``); its record is judged like a trial's.

Not covered: hooks and probes while the modules are imported (they would touch them first).
"""

from __future__ import annotations

import importlib
import platform
import sys
import threading
import time
from typing import Any

from harness.crew import Crew, Member

# What a program that compiles reaches first, each by another way into the same modules.
TORCH_TOUCHES = (
    "torch._dynamo",
    "torch._dynamo.backends.common",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
    "torch._functorch.aot_autograd",
    "torch.fx.experimental.proxy_tensor",
    "torch.export",
)


def first_touch(
    *,
    before: str = "torch",
    touches: list[str] | None = None,
    threads: int = 3,
    deadline: float = 200.0,
    canaries: bool = True,
) -> dict[str, Any]:
    """Imports ``before`` in the main thread, then ``touches`` in all threads at once.

    Each thread begins with another one of them, so that the imports cross. What is there already
    is left out; ``touched`` in the record says what was touched.

    Args:
        before: a module, or "" for none.
        touches: dotted names; :data:`TORCH_TOUCHES` when None.
        threads: how many threads.
        deadline: seconds for all of them.
        canaries: whether a fresh compile and an eager module must work afterwards.

    Raises:
        ValueError: all of them are there already.
    """
    begun = time.monotonic()
    names = list(TORCH_TOUCHES if touches is None else touches)
    if before:
        importlib.import_module(before)
    cold = [name for name in names if name not in sys.modules]
    if not cold:
        raise ValueError(f"{', '.join(names)}: imported already, so nobody touches it first")
    names = cold  # what torch itself imports differs by version
    crew = Crew(threads, start="together", deadline=deadline, name="toucher")
    together = threading.Barrier(threads)

    def touch(member: Member) -> None:
        first = member.index * len(names) // threads
        together.wait(deadline)
        for name in names[first:] + names[:first]:
            importlib.import_module(name)

    outcomes = crew.run(touch)
    stopped = all(outcome.state != "unfinished" for outcome in outcomes)
    return {
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - begun, 3),
        "outcomes": [outcome.as_dict() for outcome in outcomes],
        "watch": {},
        "probes": [],
        "canaries": _canaries() if canaries and stopped else {},
        "touched": names,
    }


def _canaries() -> dict[str, str | None]:
    from harness import probes

    return probes.run_canaries()
