"""Compiled autograd that two threads leave crosswise asserts, and stays on."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="39, 58 (the same globals); no public report of this symptom found",
    state="compiled-autograd-depth",
    symptom="AssertionError: Nested Compiled Autograd Contexts must return before their parent",
    expect={
        "2.9": Shows(
            "raised",
            raises={
                "thread-0": "Nested Compiled Autograd Contexts",
                "thread-1": "Nested Compiled Autograd Contexts",
            },
            later={"eager backwards compiled": 1},
        )
    },
    schedule=(
        "thread-0 race_specimen_compiled_autograd_left:inside@entry",
        "thread-1 race_specimen_compiled_autograd_left:inside@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_compiled_autograd_left:inside@entry",),
    guarded=Shows(
        "raised",
        raises={"thread-0": "Nested Compiled", "thread-1": "Nested Compiled"},
        later={"eager backwards compiled": 1},
    ),
)

COMPILES: list[int] = []


def inside():
    pass


def compiler(graph):
    COMPILES.append(1)
    return graph


def program(compile):
    from torch._dynamo import compiled_autograd

    def block():
        with compiled_autograd._enable(compiler):
            inside()

    return [block, block]


def afterwards():
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    return {"eager backwards compiled": len(COMPILES)}
