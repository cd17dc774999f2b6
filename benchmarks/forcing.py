"""Forces the known races n times each and prints n of n; searches for one without being told where.

    python benchmarks/forcing.py [--runs 100] [--only NAME]

Each run is a fresh process (a fork of a server that has imported torch), so every figure of time
is after the fork. A case counts only when its own verdict, exception and state are there and its
schedule was followed to its end. Each race has its true negative beside it: the same threads in
another order, or torch with its repair. Exit code 1 when a case is not n of n.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "harness"))

import programs  # noqa: E402

from harness.explore import PRELOADED, Runner, Target, explore  # noqa: E402
from harness.isolate import Isolation  # noqa: E402
from harness.replay import Schedule  # noqa: E402
from harness.search_command import stuck  # noqa: E402
from harness.shrink import shrink  # noqa: E402
from harness.verdict import Record, judge  # noqa: E402

FILE = str(Path(programs.__file__).resolve())
LIMIT = 3.0  # seconds after the fork
SEARCH_LIMIT = 60.0


@dataclass(frozen=True)
class Case:
    """One forced schedule: what runs, in which order, and what must be there afterwards."""

    name: str
    program: str
    lines: tuple[str, ...]
    shows: Callable[[Record], bool]
    runs: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    here: Callable[[], bool] = lambda: True  # whether this torch has what the case is about


def has_repair() -> bool:
    """torch 2.13 hides the flag while anybody compiles, 2.14 makes it thread-local."""
    import torch

    return hasattr(torch.compiler, "_compile_session_context")


def masks_annotate() -> bool:
    """Building a BlockMask enters torch.fx.traceback.annotate."""
    import inspect

    from torch.nn.attention import flex_attention as flex

    return "annotate(" in inspect.getsource(flex._dense_to_ordered)


def died(record: Record, threads: set[str], exception: str, message: str) -> bool:
    """Exactly these threads raised exactly this."""
    dead = {o["thread"]: o["error"] for o in record["outcomes"] if o["state"] == "raised"}
    return dead.keys() == threads and all(
        error["type"].endswith(exception) and message in error["message"] for error in dead.values()
    )


def patched(record: Record) -> bool:
    """nn.Module stayed patched."""
    return stuck("module-call")(record)


def completed(record: Record) -> bool:
    """Nothing at all."""
    return str(judge(record)) == "completed"


CROSSWISE = ("thread-0 trace.body", "thread-1 trace.body", "thread-0 end", "thread-1 end")
NESTED = ("thread-0 trace.body", "thread-1 end", "thread-0 end")
FLAG = ("thread-1 trace.body", "thread-0 end", "thread-2 end", "thread-1 end")
FX = "FX to symbolically trace a dynamo-optimized function"
# Without the bug both are let in, and wait for dynamo's lock like any cold call.
LET_IN = ("thread-1 trace.body", "thread-0 lock.wait", "thread-2 lock.wait", "thread-1 end")
ONE_STEP = {"arguments": {"steps": 1}}

CASES = (
    Case(
        "fx-flag",
        "warm_beside_recompile",
        FLAG,
        lambda record: died(record, {"thread-0", "thread-2"}, "RuntimeError", FX),
        options={"unfix": ("fx-tracing-flag",), **ONE_STEP},
    ),
    Case("fx-flag, repaired", "warm_beside_recompile", LET_IN, completed, 5, ONE_STEP, has_repair),
    Case(
        "annotation",
        "two_masks",
        ("thread-0 annotate.tested", "thread-1 annotate.body", "thread-0 end", "thread-1 end"),
        lambda record: died(record, {"thread-1"}, "KeyError", "custom"),
        20,
        here=masks_annotate,
    ),
    Case("annotation, in turn", "two_masks", ("thread-0 end", "thread-1 end"), completed, 5),
    Case(
        "compile x make_fx",
        "compile_beside_trace",
        CROSSWISE,
        lambda record: (
            died(record, {"thread-1"}, "AssertionError", "CURRENT_PATCHER") and patched(record)
        ),
        30,
    ),
    Case(
        "compile x make_fx, silent",
        "compile_beside_trace",
        (
            "thread-0 patch.enter",
            "thread-1 trace.body",
            "thread-0 trace.body",
            "thread-1 end",
            "thread-0 end",
        ),
        lambda record: died(record, set(), "", "") and patched(record),
        30,
        {"canaries": True},
    ),
    Case("make_fx x make_fx, nested", "two_traces", NESTED, completed, 5, {"canaries": True}),
)


def force(case: Case, runs: int, isolation: Isolation) -> bool:
    """Runs one case n times and prints its line."""
    runner = Runner(Target(FILE, case.program, **case.options), isolation)
    schedule = Schedule.parse("\n".join(("schedule v1", *case.lines)))
    good, seconds = 0, []
    for _ in range(runs):
        record = runner.replay(schedule)
        seconds.append(record["process"]["seconds"] - record["process"]["start_seconds"])
        # A process that died natively has no script, and shows nothing.
        good += "script" in record and record["script"]["missed"] is None and case.shows(record)
    within = sum(one < LIMIT for one in seconds)
    print(
        f"{case.name:28} {good:4} of {runs:<4} median {statistics.median(seconds):5.2f} s, "
        f"longest {max(seconds):5.2f} s, {within} of {runs} under {LIMIT:g} s",
        flush=True,
    )
    return good == runs and (within == runs or case.shows is completed)


def search(isolation: Isolation) -> bool:
    """Finds the stuck flag in a plain program of two threads, and shrinks the schedule."""
    import torch.fx._symbolic_trace as st

    state = "fx-tracing-flag" if hasattr(st, "_is_fx_tracing_flag") else "module-call"
    found = explore(
        programs.two_traces,
        failing=stuck(state),
        budget_seconds=SEARCH_LIMIT,
        isolation=isolation,
    )
    print(f"search for a stuck {state}: {found}", flush=True)
    if found.schedule is None:
        return False
    begun = time.monotonic()
    runner = Runner(Target.of_schedule(found.schedule), isolation)
    small = shrink(found.schedule, runner.replay, stuck(state))
    print(f"shrunk in {time.monotonic() - begun:.1f} s: {small}")
    for line in small.schedule.lines:
        print(f"    {line}")
    return bool(found.controlled) and small.holds and small.schedule.switches <= 3


def main() -> int:
    """Runs all; returns the exit code."""
    names = [*(case.name for case in CASES), "search"]
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="of a case without its own number")
    parser.add_argument("--only", choices=names, help="one of them")
    options = parser.parse_args()
    good = True
    with Isolation(preload=PRELOADED) as isolation:
        for case in CASES:
            if options.only not in (None, case.name):
                continue
            if not case.here():
                print(f"{case.name:28} not on this torch")
            else:
                good &= force(case, case.runs or options.runs, isolation)
        if options.only in (None, "search"):
            good &= search(isolation)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
