"""The only warning of eager flex_attention is lost for good while another thread compiles.

It is shown once per process, not while anybody compiles, and is marked as shown either way.
"""

from __future__ import annotations

import warnings

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="91: vllm#27178; no public report of the lost warning found",
    state="eager-flex-warning",
    symptom="flex_attention runs uncompiled, and nobody is told, then or later",
    expect={
        "2.9": Shows("silently eager", stuck=("eager-flex-warning",), later={"warnings": 1}),
        "2.13": Shows("silently eager", stuck=("eager-flex-warning",), later={"warnings": 0}),
    },
    schedule=("thread-0 aot.begin", "thread-1 flex.eager", "thread-0 end", "thread-1 end"),
    points=("aot.begin",),
    in_turn=False,
    guarded=Shows("silently eager", stuck=("eager-flex-warning",), later={"warnings": 1}),
)


_SEEN: list[str] = []


def program(compile):
    from torch.nn.attention.flex_attention import flex_attention

    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    q = torch.ones(1, 1, 16, 16)
    warnings.showwarning = lambda message, *_: _SEEN.append(str(message))
    return [lambda: cold(torch.ones(2, requires_grad=True)), lambda: flex_attention(q, q, q)]


def afterwards():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 1, 16, 16)
    flex_attention(q, q, q)
    return {"warnings": sum("flex_attention" in text for text in _SEEN)}
