"""error_on_nested_fx_trace=False takes the error away, and the compiled code with it.

The call runs flex_attention eager: the full score matrix, and not a word of it.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="13: pytorch#179836",
    state="fx-tracing-flag",
    symptom="none: flex_attention runs uncompiled and materialises the scores",
    expect={
        # The program's own option holds for the whole process before 2.12.
        "2.9": Shows("silently eager", stuck=("dynamo-config", "eager-flex-warning")),
        "2.12": Shows("silently eager", stuck=("eager-flex-warning",)),
        "2.14": Shows(),
    },
    absent={"2.14": "the flag is thread-local"},
    schedule=("thread-0 trace.body", "thread-1 end", "thread-0 end"),
    unfix=("fx-flag-thread-local",),
    unfixed=Shows("silently eager", stuck=("eager-flex-warning",)),
    guarded={"2.9": Shows("sticky state", stuck=("dynamo-config",)), "2.12": Shows()},
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
