"""Two make_fx traces that cross leave the FX flag up: every later compiled call raises.

Flag and patcher are saved and put back; who leaves last puts the other one's value back.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="7, 11: pytorch#168042, #189884",
    state="fx-tracing-flag",
    symptom="AssertionError in one thread, then 'using FX to symbolically trace' in all, for ever",
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
            later={"a compiled call": "raised RuntimeError"},
        ),
        "2.11": Shows(
            "raised",
            raises={"thread-1": "CURRENT_PATCHER is None in finally block"},
            stuck=("fx-tracing-flag", "make-fx-tracer", "module-call", "module-getattr"),
            later={"a compiled call": "raised RuntimeError"},
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
    def trace():
        make_fx(lambda x: x.sin())(torch.ones(2))

    return [trace, trace]


def afterwards():
    try:
        torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(2))
    except Exception as error:
        return {"a compiled call": f"raised {type(error).__name__}"}
    return {"a compiled call": "worked"}
