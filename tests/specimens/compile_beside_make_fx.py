"""A compile and a make_fx that cross: the FX patcher asserts, and nn.Module stays patched."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="7, 10, 11: pytorch#168042, #187589, #189884",
    state="fx-patcher",
    symptom="AssertionError: CURRENT_PATCHER is None in finally block",
    expect={
        "2.9": Shows(
            "raised",
            raises={"thread-1": "AssertionError"},
            stuck=(
                "dispatch-mode",
                "fx-tracing-flag",
                "make-fx-tracer",
                "module-call",
                "module-getattr",
            ),
        ),
        "2.11": Shows(
            "raised",
            raises={"thread-1": "CURRENT_PATCHER is None in finally block"},
            stuck=("fx-tracing-flag", "make-fx-tracer", "module-call", "module-getattr"),
        ),
        "2.14": Shows(
            "raised",
            raises={"thread-1": "CURRENT_PATCHER is None in finally block"},
            stuck=("make-fx-tracer", "module-call", "module-getattr"),
        ),
    },
    schedule=("thread-0 trace.body", "thread-1 trace.body", "thread-0 end", "thread-1 end"),
    guarded=Shows(refused=True),
)


def program(compile):
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [
        lambda: cold(torch.ones(2, requires_grad=True)).sum().backward(),
        lambda: make_fx(lambda x: x.sin())(torch.ones(2)),
    ]
