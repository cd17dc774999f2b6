"""torch.compiler.is_compiling() says yes in a thread that compiles nothing."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="17: pytorch#184614",
    state="is-compiling",
    symptom="eager code that asks is_compiling() takes its traced branch",
    expect={"2.9": Shows(), "2.13": Shows("wrong number")},
    absent={"2.9": "a compile does not set the flag for its whole session before 2.13"},
    schedule=("thread-0 lock.held", "thread-0 dynamo.begin", "thread-0 aot.begin", "thread-1 end"),
    points=("lock.held", "dynamo.begin", "aot.begin"),
)


def program(compile):
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [lambda: cold(torch.ones(2, requires_grad=True)), torch.compiler.is_compiling]


def check(trial, results):
    trial.number("is_compiling() in thread-1", float(results[1]), 0.0)
