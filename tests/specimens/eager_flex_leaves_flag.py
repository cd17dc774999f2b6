"""A thread that falls to eager flex_attention leaves the FX flag up for ever.

It saves True while another thread traces, and puts True back when that trace has ended.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="13 and finding 0.4 of the reference; no public report of the stuck flag found",
    state="fx-tracing-flag",
    symptom="every later compiled call of every thread runs eager (or raises)",
    expect={
        # The program's own option holds for the whole process before 2.12, so nothing raises.
        "2.9": Shows(
            "silently eager",
            stuck=("dynamo-config", "eager-flex-warning", "fx-tracing-flag"),
            later={"a compiled call": "worked"},
        ),
        "2.12": Shows(
            "silently eager",
            stuck=("eager-flex-warning", "fx-tracing-flag"),
            later={"a compiled call": "raised RuntimeError"},
        ),
        "2.14": Shows(refused=True),
    },
    absent={"2.14": "the flag is thread-local"},
    schedule=(
        "thread-0 trace.body",
        "thread-1 lock.wait",
        "thread-0 end",
        "thread-1 end",
    ),
    guarded={
        "2.9": Shows("sticky state", stuck=("dynamo-config",), refused=True),
        "2.12": Shows(refused=True),
    },
)


def program(compile):
    from torch.nn.attention.flex_attention import flex_attention

    attend = compile(flex_attention, backend="eager", dynamic=False)
    q = torch.ones(1, 1, 16, 16)
    attend(q, q, q)

    def call():
        torch._dynamo.config.error_on_nested_fx_trace = False
        attend(q, q, q)

    return [lambda: make_fx(lambda x: x.sin())(torch.ones(2)), call]


def afterwards():
    try:
        torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(2))
    except Exception as error:
        return {"a compiled call": f"raised {type(error).__name__}"}
    return {"a compiled call": "worked"}
