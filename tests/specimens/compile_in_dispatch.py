"""A compiled call inside __torch_dispatch__ while the outer function is being traced."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.utils._python_dispatch import TorchDispatchMode

SPECIMEN = Specimen(
    rows="15: pytorch#150262, #150355",
    state="fx-tracing-flag",
    symptom="RuntimeError: Detected that you are using FX to symbolically trace ...",
    expect={"2.9": Shows()},
    absent={"2.9": "fixed in 2.8: fake propagation runs such calls eager"},
    in_turn=False,
    guarded=None,
)


class Mode(TorchDispatchMode):
    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.sin.default:
            return self.compiled(*args)
        return function(*args, **(kwargs or {}))


def program(compile):
    inner = compile(lambda x: x.cos(), backend="eager")

    def call():
        with Mode(inner):
            return torch.ones(2).sin()

    return [call]


def check(trial, results):
    expected = torch.ones(2).cos()
    trial.number("cos through the mode", float((results[0] - expected).abs().max()), 1e-6)
