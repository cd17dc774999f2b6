"""A ContextVar in compiled code is not supported: a graph break, and an error with fullgraph."""

from __future__ import annotations

import contextvars

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="36: pytorch#186449",
    state="ContextVar",
    symptom="Unsupported, where the thread's own setting should be read",
    expect={"2.9": Shows("raised", raises={"thread-0": "Unsupported"}), "2.14": Shows()},
    absent={"2.14": "dynamo traces ContextVar.get"},
    in_turn=False,
    guarded=None,
)


FACTOR = contextvars.ContextVar("factor", default=2.0)


def program(compile):
    compiled = compile(lambda x: x * FACTOR.get(), backend="eager", fullgraph=True)
    return [lambda: compiled(torch.ones(2))]
