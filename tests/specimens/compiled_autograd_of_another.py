"""Compiled autograd of one thread compiles the plain eager backward of another."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="39, 58 (the same globals); no public report of this symptom found",
    state="compiled-autograd",
    symptom="a backward that nobody asked to compile is compiled",
    expect={"2.9": Shows("spurious recompile")},
    schedule=(
        "thread-0 race_specimen_compiled_autograd_of_another:inside@entry",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("race_specimen_compiled_autograd_of_another:inside@entry",),
    guarded=Shows("spurious recompile"),
)

COMPILES: list[int] = []


def inside():
    pass


def compiler(graph):
    COMPILES.append(1)
    return graph


def program(compile):
    from torch._dynamo import compiled_autograd

    x = torch.ones(2, requires_grad=True)
    loss = (x * 2).sum()

    def block():
        with compiled_autograd._enable(compiler):
            inside()

    return [block, loss.backward]


def check(trial, results):
    trial.expect_compiles({"eager backward": 0}, {"eager backward": len(COMPILES)})
