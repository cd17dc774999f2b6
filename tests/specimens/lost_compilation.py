"""The silent order of a compile beside a make_fx: nobody raises, nn.Module stays patched.

thread-0 has written its patcher and hands out what stands there by then: thread-1's.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="10: pytorch#187589 (the report has another symptom)",
    state="module-call",
    symptom="nn.Module stays patched; but on 2.13 a later torch.compile of a module runs eager",
    expect={
        "2.9": Shows("silently eager", stuck=("module-call", "module-getattr")),
        "2.13": Shows("sticky state", stuck=("module-call", "module-getattr")),
        "2.14": Shows("silently eager", stuck=("module-call", "module-getattr")),
    },
    schedule=(
        "thread-0 patch.enter",
        "thread-1 trace.body",
        "thread-0 trace.body",
        "thread-1 end",
        "thread-0 end",
    ),
    canaries=True,
    guarded=Shows(refused=True),
)


def program(compile):
    cold = compile(lambda x: x.sin() * 2, backend="aot_eager")
    return [
        lambda: cold(torch.ones(2, requires_grad=True)).sum().backward(),
        lambda: make_fx(lambda x: x.sin())(torch.ones(2)),
    ]
