"""fail_on_recompile leaves frames alone that dynamo only skips."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="32: pytorch#139202",
    state="stance",
    symptom="RuntimeError for a frame that is not compiled at all",
    expect={"2.9": Shows()},
    absent={"2.9": "fixed in 2.6: a frame without tensors is no recompile"},
    in_turn=False,
)


def _helper(number):
    return number + 1


def program(compile):
    def work(x):
        torch._dynamo.graph_break()
        return x * _helper(1)

    compiled = compile(work, backend="eager")
    compiled(torch.ones(2))

    def call():
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(torch.ones(2))

    return [call]


def check(trial, results):
    trial.number("2 times 1", float((results[0] - 2).abs().max()), 0.0)
