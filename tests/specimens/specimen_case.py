"""Runs one specimen in the process of an isolated case; returns the trial's record."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # this file is loaded by path, not as a package

from harness import Control, Follow, Member, Schedule, Trial  # noqa: E402
from harness.control import SWITCH_POINTS  # noqa: E402

PATIENCE, DEADLINE = 20.0, 60.0
FORCED, IN_TURN, LOCKED = "forced", "in turn", "locked"


def run(*, name: str, order: str = FORCED, unfix: list[str], guard: str = "") -> dict[str, Any]:
    """One run.

    Args:
        name: the specimen's.
        order: forced; in turn, one thread after the other; locked: free, with one lock round what
            each thread does.
        unfix: repairs of torch to take out.
        guard: name of a guard of dflash, or none.
    """
    torch.set_num_threads(1)
    _survive_cuda_build_without_gpu()
    module = _load(name)
    specimen = module.SPECIMEN
    trial = Trial(unfix=unfix, control=_control(specimen, order), interval=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(trial)
        threads = list(module.program(_compile(stack, guard)))
        lock = threading.Lock() if order == LOCKED else contextlib.nullcontext()

        def work(member: Member) -> object:
            with member.step(0), lock:
                return threads[member.index]()

        outcomes = trial.run(len(threads), work, start="together", name="thread", deadline=DEADLINE)
        if hasattr(module, "check"):
            module.check(trial, [outcome.result for outcome in outcomes])
    record = trial.record(canaries=specimen.canaries)
    stopped = all(outcome["state"] != "unfinished" for outcome in record["outcomes"])
    if stopped and hasattr(module, "afterwards"):
        record["later"] = module.afterwards()
    return record


def _survive_cuda_build_without_gpu() -> None:
    """Up to 2.12 such a build crashes when two threads compile; a race shall show itself."""
    ensure = hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    if ensure and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def _load(name: str) -> Any:
    full = f"race_specimen_{name}"
    spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def _control(specimen: Any, order: str) -> Control | None:
    if order == LOCKED or not specimen.schedule:
        return None
    lines = specimen.schedule
    if order == IN_TURN:
        threads = sorted({line.split()[0] for line in lines})
        lines = tuple(f"{thread} end" for thread in threads)
    schedule = Schedule.parse("\n".join(("schedule v1", *lines)))
    points = (*SWITCH_POINTS, *specimen.points)
    return Control(Follow(schedule.lines), points=points, patience=PATIENCE)


def _compile(stack: contextlib.ExitStack, guard: str) -> Callable[..., Any]:
    """``torch.compile``, or the guard's; keywords that only torch's has are left out there."""
    if not guard:
        return torch.compile
    from dflash.compile import compile_guard

    protection = stack.enter_context(compile_guard(guard))
    known = ("backend", "dynamic", "fullgraph")

    def guarded(function: Callable[..., Any], **options: Any) -> Any:
        return protection.compile(function, **{k: v for k, v in options.items() if k in known})

    return guarded
