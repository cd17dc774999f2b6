"""A module's always_call hook is skipped when its forward fails beside a compile."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="17: pytorch#184614; no public report of this symptom found",
    state="is-compiling",
    symptom="a forward hook with always_call=True does not run after an exception",
    expect={"2.9": Shows(), "2.13": Shows("wrong number")},
    absent={"2.9": "a compile does not set the flag for its whole session before 2.13"},
    schedule=("thread-0 aot.begin", "thread-1 end", "thread-0 end"),
    points=("aot.begin",),
)


def program(compile):
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [lambda: cold(torch.ones(2, requires_grad=True)), _calls_of_the_hook]


def _calls_of_the_hook():
    calls = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: calls.append(1), always_call=True)
    try:
        layer(torch.ones(3))  # a wrong shape
    except RuntimeError:
        return len(calls)
    raise AssertionError("the forward should have failed")


def check(trial, results):
    trial.number("calls of the hook, from one", abs(results[1] - 1), 0.0)
