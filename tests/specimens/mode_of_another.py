"""A dispatch mode of one thread makes dynamo skip another thread's frame, for ever."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.utils._python_dispatch import TorchDispatchMode

SPECIMEN = Specimen(
    rows="40: no public report found",
    state="dispatch-mode-compiled",
    symptom="none: the function is never compiled, now or later, in any thread",
    expect={"2.9": Shows("spurious recompile"), "2.11": Shows()},
    absent={"2.11": "dynamo asks the thread's own stack of modes by default"},
    schedule=(
        "thread-0 race_specimen_mode_of_another:inside@entry",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("race_specimen_mode_of_another:inside@entry",),
    unfix=("dispatch-mode-stack",),
    unfixed=Shows("spurious recompile"),
    guarded=Shows("spurious recompile"),
)

COMPILES: list[int] = []


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def inside():
    pass


def backend(graph, _inputs):
    COMPILES.append(1)
    return graph.forward


def program(compile):
    cold = compile(lambda x: x.sin(), backend=backend)

    def block():
        with Mode():
            inside()

    def call():
        for _ in range(2):
            cold(torch.ones(2))

    return [block, call]


def check(trial, results):
    trial.expect_compiles({"cold": 1}, {"cold": len(COMPILES)})
