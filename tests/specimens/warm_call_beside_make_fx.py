"""A warm compiled call dies while another thread is inside make_fx.

The check in the wrapper of a compiled function reads a flag of the process. make_fx takes no lock.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="1, 21: pytorch#126024",
    state="fx-tracing-flag",
    symptom="RuntimeError: Detected that you are using FX to symbolically trace ...",
    expect={
        "2.9": Shows(
            "raised",
            raises={"thread-1": "FX to symbolically trace"},
        ),
        "2.14": Shows(),
    },
    absent={"2.14": "the flag is thread-local (pytorch#168999)"},
    schedule=("thread-0 trace.body", "thread-1 end", "thread-0 end"),
    unfix=("fx-flag-thread-local",),
    unfixed=Shows(
        "raised",
        raises={"thread-1": "FX to symbolically trace"},
    ),
)


def program(compile):
    warm = compile(lambda x: x.cos(), backend="eager")
    warm(torch.ones(2))
    return [lambda: make_fx(lambda x: x.sin())(torch.ones(2)), lambda: warm(torch.ones(2))]
