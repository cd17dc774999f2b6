"""Two threads that are first to run one function's backward both compile it."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="none found",
    state="the backward of a compiled function",
    symptom="the backward is compiled twice",
    expect={"2.9": Shows("spurious recompile")},
    schedule=("thread-0 backward.first", "thread-1 backward.first", "thread-0 end", "thread-1 end"),
    points=("backward.first",),
    guarded=Shows("spurious recompile"),
)

COMPILES: list[int] = []


def forward(graph, _inputs):
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)


def backward(graph, inputs):
    COMPILES.append(1)
    return forward(graph, inputs)


def program(compile):
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    compiled = compile(lambda x: (x.sin() * 2).sum(), backend=backend)
    losses = [compiled(torch.ones(2, requires_grad=True)) for _ in range(2)]
    return [losses[0].backward, losses[1].backward]


def check(trial, results):
    trial.expect_compiles({"backward": 1}, {"backward": len(COMPILES)})
