"""An eager optimizer step taken while another thread compiles gives other numbers."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="17: pytorch#184614; no public report of the numbers found",
    state="is-compiling",
    symptom="foreach AdamW differs from a run alone by about 1e-7 per step",
    expect={"2.9": Shows(), "2.13": Shows("wrong number")},
    absent={"2.9": "a compile does not set the flag for its whole session before 2.13"},
    schedule=("thread-0 aot.begin", "thread-1 end", "thread-0 end"),
    points=("aot.begin",),
)


def program(compile):
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [lambda: cold(torch.ones(2, requires_grad=True)), _weights]


def _weights():
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 48, generator=draw))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, foreach=True)
    for _ in range(17):
        weight.grad = torch.randn(64, 48, generator=draw)
        optimizer.step()
    return weight.detach()


def check(trial, results):
    alone = _weights()
    trial.number("weights of thread-1", float((results[1] - alone).abs().max()), 0.0)
