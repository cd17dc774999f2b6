"""One thread's error_on_graph_break makes another thread's graph break an error."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="none found",
    state="graph-break-errors",
    symptom="Unsupported: Call to torch._dynamo.graph_break(), where breaks were allowed",
    expect={"2.11": Shows("raised", raises={"thread-1": "graph_break"})},
    schedule=(
        "thread-0 race_specimen_graph_break_policy_of_another:inside@entry",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("race_specimen_graph_break_policy_of_another:inside@entry",),
    guarded=Shows("raised", raises={"thread-1": "graph_break"}),
)


def inside():
    pass


def program(compile):
    def with_a_break(x):
        torch._dynamo.graph_break()
        return x.sin()

    cold = compile(with_a_break, backend="eager")

    def strict():
        with torch._dynamo.error_on_graph_break(True):
            inside()

    return [strict, lambda: cold(torch.ones(2))]
