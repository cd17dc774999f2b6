"""An eager differentiable collective raises while another thread compiles."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="17: pytorch#184614; no public report of this symptom found",
    state="is-compiling",
    symptom="RuntimeError: torch.distributed.nn.functional.X is not supported under torch.compile",
    expect={
        "2.9": Shows(),
        "2.13": Shows("raised", raises={"thread-1": "is not supported under torch.compile"}),
    },
    absent={"2.9": "a compile does not set the flag for its whole session before 2.13"},
    schedule=("thread-0 aot.begin", "thread-1 end", "thread-0 end"),
    points=("aot.begin",),
)


def program(compile):
    import torch.distributed as dist
    import torch.distributed.nn.functional as functional

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [
        lambda: cold(torch.ones(2, requires_grad=True)),
        lambda: functional.reduce(torch.ones(2), 0),
    ]
