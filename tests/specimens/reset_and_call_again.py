"""compile, torch._dynamo.reset(), call and compile again."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="30: pytorch#155057",
    state="the list of cache entries of a code object",
    symptom="segmentation fault",
    expect={"2.9": Shows()},
    absent={"2.9": "fixed in 2.8"},
    in_turn=False,
)


def program(compile):
    compiled = compile(lambda x: x.sin(), backend="eager")

    def work():
        for _ in range(3):
            compiled(torch.ones(2))
            torch._dynamo.reset()
        return compiled(torch.ones(2))

    return [work]
