"""Two compiled modules whose calls cross: torch believes for ever to be inside one."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="none found",
    state="in-optimized-module",
    symptom="module trackers stop to record eager modules",
    expect={"2.11": Shows("sticky state", stuck=("in-optimized-module",))},
    schedule=("thread-0 call.checked", "thread-1 call.checked", "thread-0 end", "thread-1 end"),
    points=("call.checked",),
    guarded=Shows("sticky state", stuck=("in-optimized-module",)),
)


def program(compile):
    layers = [torch.compile(torch.nn.Linear(2, 2), backend="eager") for _ in range(2)]
    for layer in layers:
        layer(torch.ones(2))
    return [lambda: layers[0](torch.ones(2)), lambda: layers[1](torch.ones(2))]
