"""fail_on_recompile of one thread kills the first compile of another."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="32, 33: pytorch#137504",
    state="stance",
    symptom="RuntimeError: Detected recompile when torch.compile stance is 'fail_on_recompile'",
    expect={"2.9": Shows("raised", raises={"thread-1": "fail_on_recompile"})},
    schedule=(
        "thread-0 race_specimen_stance_of_another:inside@entry",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("race_specimen_stance_of_another:inside@entry",),
    guarded=Shows("raised", raises={"thread-1": "fail_on_recompile"}),
)


def inside():
    pass


def program(compile):
    cold = compile(lambda x: x.sin(), backend="eager")

    def block():
        with torch.compiler.set_stance("fail_on_recompile"):
            inside()

    return [block, lambda: cold(torch.ones(2))]
