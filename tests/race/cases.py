"""What runs inside an isolated process: one trial each, plain arguments in, its record out."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).parent))  # this file is loaded by path, not as a package

import learning
import program
import repairs
import scripts

from dflash.compile import compile_guard
from dflash.compile.flex_on_cpu import flex_training_on_cpu
from harness import Member, Script, Trial

RECOMPILE_LIMIT = 64
PATIENCE = 60.0


@dataclass(frozen=True)
class Plan:
    """How a crew of drafters runs: ``torch_masks`` says who builds the block masks."""

    start: str
    steps: int
    torch_masks: bool
    after_step: int = 1


def control(*, name: str, start: str, device: str, unfix: list[str]) -> dict[str, Any]:
    """Three drafters without the guard, with the repair ``name`` if there is one."""
    torch.set_num_threads(1)
    _survive_cuda_build_without_gpu()
    script = {
        "annotation": scripts.ANNOTATIONS_ALONE,
        "nested-trace-off": scripts.FOREIGN_TRACE,
    }.get(name, scripts.ALL_WARM + scripts.TRACE_BESIDE_WARM_CALLS)
    # An FX control shall not die of the other race: only masks made by torch annotate.
    torch_masks = name == "annotation"
    # Once flex_attention runs eager, longer runs fail in yet other ways.
    steps = program.STEPS_PER_LENGTH if name == "nested-trace-off" else program.STEPS
    first_call = threading.Lock()
    with (
        flex_training_on_cpu(),
        Trial(unfix=unfix, script=Script(script, patience=PATIENCE)) as trial,
    ):
        workshop = program.Workshop(_devices(device))
        if name == "sys-modules-shim":
            repairs.sys_modules_shim()
        compiled = [program.plain_compile(workshop.backend()) for _ in workshop.drafters]
        if name == "lock-per-thread":
            compiled = [repairs.lock_per_thread(attend) for attend in compiled]
        elif name == "lock-first-call":
            compiled = [repairs.lock_first_call(attend, first_call) for attend in compiled]
        elif name == "reader-after-wrapping":
            repairs.reader_after_wrapping()
        elif name == "nested-trace-off":
            trial.add_thread("tracer", _trace_something)

        def prepare() -> None:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            if name == "nested-trace-off":
                repairs.tolerate_nested_trace()

        plan = Plan(start, steps, torch_masks, after_step=0)
        _run_crew(trial, workshop, compiled, plan, prepare, contextlib.nullcontext)
    return trial.record()


def guarded(*, guard: str, start: str, device: str, unfix: list[str]) -> dict[str, Any]:
    """The same three drafters behind a guard; the danger is forced where the guard allows it."""
    torch.set_num_threads(1)
    overlaps = guard not in ("serial", "lock")
    steps = scripts.TRACE_BESIDE_WARM_CALLS if overlaps else ()
    if scripts.masks_annotate():
        steps = scripts.annotations_overlap(step=2) + steps
    script = Script(steps, patience=PATIENCE) if steps else None
    with flex_training_on_cpu(), Trial(unfix=unfix, script=script) as trial:
        with compile_guard(guard, recompile_limit=RECOMPILE_LIMIT) as protection:
            trial.note(guard=protection.explanation, proof=protection.prove())
            workshop = program.Workshop(_devices(device))
            compiled = [
                protection.compile(
                    flex_attention, label=f"drafter-{index}", backend=workshop.backend()
                )
                for index in range(program.DRAFTERS)
            ]
            planned = {f"drafter-{index}": program.LENGTHS for index in range(program.DRAFTERS)}
            protection.compiles.clear()  # what the proof compiled
            if guard == "serial":
                protection.warm_up(_warm_up_tasks(workshop, compiled, protection.region))
            before = protection.intercepted
            plan = Plan(start, program.STEPS, torch_masks=True)
            _run_crew(trial, workshop, compiled, plan, _nothing, protection.region)
            trial.expect_compiles(planned, dict(protection.compiles))
            trial.note(intercepted=protection.intercepted - before)
    return trial.record()


def real_input(*, start: str, device: str) -> dict[str, Any]:
    """Three drafters train behind the guard on features of a real target over real text."""
    torch.set_num_threads(1)
    script = Script(scripts.FIRST_COMPILE_BESIDE_WARM_CALL, patience=PATIENCE)
    with flex_training_on_cpu(), Trial(script=script) as trial:
        with compile_guard("auto", recompile_limit=RECOMPILE_LIMIT) as protection:
            lessons = [
                learning.Lesson(index, place, protection)
                for index, place in enumerate(_devices(device))
            ]

            def work(member: Member) -> list[float]:
                lesson = lessons[member.index]
                losses = []
                for number in range(learning.STEPS):
                    with member.step(number):
                        losses.append(lesson.step())
                if not losses[-1] < learning.GOAL * losses[0]:
                    raise AssertionError(f"the loss did not go down: {losses}")
                return losses

            outcomes = trial.run(program.DRAFTERS, work, start=start)
            trial.expect_compiles({lesson.label: 1 for lesson in lessons}, protection.compiles)
            trial.note(losses={o.thread: o.result for o in outcomes}, text=learning.TEXT)
    return trial.record()


def _run_crew(
    trial: Trial,
    workshop: program.Workshop,
    compiled: list[Callable[..., Any]],
    plan: Plan,
    prepare: Callable[[], None],
    region: Callable[[], Any],
) -> None:
    worst: dict[str, tuple[float, float]] = {}

    def work(member: Member) -> None:
        prepare()
        drafter, attend = workshop.drafters[member.index], compiled[member.index]
        worst[member.name] = (0.0, 0.0)
        for number in range(plan.steps):
            with member.step(number):
                row = workshop.row(member.index, number)
                got = program.train_step(drafter, row, attend, region, plan.torch_masks)
            old = worst[member.name]
            worst[member.name] = (max(old[0], got[0]), max(old[1], got[1]))

    trial.run(program.DRAFTERS, work, start=plan.start, after_step=plan.after_step)
    for name, (output, gradient) in sorted(worst.items()):
        trial.number(f"{name} output", output, program.TOLERANCE)
        trial.number(f"{name} gradients", gradient, program.TOLERANCE)


def _warm_up_tasks(
    workshop: program.Workshop,
    compiled: list[Callable[..., Any]],
    region: Callable[[], Any],
) -> dict[str, Callable[[], object]]:
    def task(index: int, step: int) -> Callable[[], object]:
        return lambda: program.train_step(
            workshop.drafters[index], workshop.row(index, step), compiled[index], region, True
        )

    return {
        f"drafter-{index} length {program.row_length(index, step)}": task(index, step)
        for index in range(program.DRAFTERS)
        for step in range(0, program.STEPS, program.STEPS_PER_LENGTH)
    }


def _trace_something(_member: Member) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: x.sin())(torch.ones(2))


def _nothing() -> None:
    return None


def _devices(device: str) -> list[torch.device]:
    """The drafters' devices: ``cpu``, one named GPU for all, or ``cuda``: one GPU after another."""
    if device == "cuda":
        count = torch.cuda.device_count()
        return [torch.device("cuda", index % count) for index in range(program.DRAFTERS)]
    return [torch.device(device)] * program.DRAFTERS


def _survive_cuda_build_without_gpu() -> None:
    """A control shall die of what it is about; see the guard's state 'cuda-device-guard'."""
    ensure = hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    if ensure and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


__all__ = ["control", "guarded", "real_input"]
