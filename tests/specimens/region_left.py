"""Two calls in regions of their own that cross leave one region's id behind.

Later calls without a region look in the wrong bucket of the cache.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="25: pytorch#196637",
    state="region-id",
    symptom="warm functions compile again: the process stays in somebody's region",
    expect={"2.13": Shows("sticky state", stuck=("region-id",)), "2.15": Shows()},
    absent={"2.15": "the flag is per thread"},
    schedule=("thread-0 call.checked", "thread-1 call.checked", "thread-0 end", "thread-1 end"),
    points=("call.checked",),
)


def program(compile):
    regions = [
        compile(function, backend="eager", isolate_recompiles=True)
        for function in (lambda x: x.sin(), lambda x: x.cos())
    ]
    for region in regions:
        region(torch.ones(2))
    return [lambda: regions[0](torch.ones(2)), lambda: regions[1](torch.ones(2))]
