"""A threading.local in compiled code: each thread computes with its own value."""

from __future__ import annotations

import threading

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="35: pytorch#104066",
    state="threading.local",
    symptom="the value of the thread that compiled, or None",
    expect={"2.9": Shows()},
    absent={"2.9": "supported since 2.1"},
    schedule=("thread-0 end", "thread-1 end"),
)


OWN = threading.local()


def program(compile):
    compiled = compile(lambda x: x * OWN.factor, backend="eager")

    def scaled(factor):
        OWN.factor = torch.tensor(float(factor))
        return compiled(torch.ones(2))

    return [lambda: scaled(2), lambda: scaled(3)]


def check(trial, results):
    for factor, result in zip((2, 3), results, strict=True):
        trial.number(f"1 times {factor}", float((result - factor).abs().max()), 0.0)
