"""A warm compiled call dies while another thread compiles for the first time.

The compile traces its joint graph under dynamo's lock; the check that kills the victim is outside.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="1, 2, 18, 20, 21: pytorch#126024, #105943",
    state="fx-tracing-flag",
    symptom="RuntimeError: Detected that you are using FX to symbolically trace ...",
    expect={
        "2.9": Shows(
            "raised",
            raises={"thread-1": "FX to symbolically trace"},
        ),
        "2.13": Shows(),
    },
    absent={"2.13": "the compile session hides the flag (pytorch#184614)"},
    schedule=("thread-0 trace.body", "thread-1 end", "thread-0 end"),
    unfix=("fx-tracing-flag",),
    unfixed=Shows(
        "raised",
        raises={"thread-1": "FX to symbolically trace"},
    ),
)


def program(compile):
    warm = compile(lambda x: x.cos(), backend="eager")
    warm(torch.ones(2))
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [
        lambda: cold(torch.ones(2, requires_grad=True)),
        lambda: warm(torch.ones(2)),
    ]
