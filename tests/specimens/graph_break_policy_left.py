"""Two error_on_graph_break blocks that cross leave graph breaks forbidden."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="none found",
    state="graph-break-errors",
    symptom="every later graph break raises, in all threads",
    expect={
        "2.11": Shows(
            "sticky state",
            stuck=("graph-break-errors",),
            later={"a graph break": "raised Unsupported"},
        )
    },
    schedule=(
        "thread-0 race_specimen_graph_break_policy_left:inside@entry",
        "thread-1 race_specimen_graph_break_policy_left:inside@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_graph_break_policy_left:inside@entry",),
    guarded=Shows("sticky state", stuck=("graph-break-errors",)),
)


def inside():
    pass


def program(compile):
    def block(policy):
        with torch._dynamo.error_on_graph_break(policy):
            inside()

    return [lambda: block(True), lambda: block(False)]


def afterwards():
    def with_a_break(x):
        torch._dynamo.graph_break()
        return x.sin()

    try:
        torch.compile(with_a_break, backend="eager")(torch.ones(2))
    except Exception as error:
        return {"a graph break": f"raised {type(error).__name__}"}
    return {"a graph break": "worked"}
