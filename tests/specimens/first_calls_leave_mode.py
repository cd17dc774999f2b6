"""The first calls of two compiled functions, crossing, leave the flag of dispatch modes up.

AOTAutograd runs the first call of each compiled function under a dispatch mode of its own, outside
dynamo's lock, and every mode saves and puts back flags of the process.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="40 (the same flags); no public report of this way to them found",
    state="dispatch-mode",
    symptom="is_in_torch_dispatch_mode() is True for ever, in every thread",
    expect={"2.13": Shows(later={"is_in_torch_dispatch_mode": True})},
    absent={"2.13": "the flag stays up; its readers are two options that are off by default"},
    schedule=(
        "thread-0 race_specimen_first_calls_leave_mode:run_graph@entry",
        "thread-1 race_specimen_first_calls_leave_mode:run_graph@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_first_calls_leave_mode:run_graph@entry",),
    unfix=("dispatch-mode-stack",),
    unfixed=Shows("sticky state", stuck=("dispatch-mode", "dispatch-mode-outside")),
    canaries=True,
    guarded=Shows("sticky state", stuck=("dispatch-mode", "dispatch-mode-outside")),
)


def run_graph(graph, args):
    return graph.forward(*args)


def backend(graph, _inputs):
    return lambda *args: run_graph(graph, args)


def program(compile):
    from torch._dynamo.backends.common import aot_autograd

    aot = aot_autograd(fw_compiler=backend)
    functions = (lambda x: x.sin() * 2, lambda x: x.cos() * 2)
    cold = [compile(function, backend=aot) for function in functions]
    return [lambda: cold[0](torch.ones(2)), lambda: cold[1](torch.ones(2))]


def afterwards():
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    return {"is_in_torch_dispatch_mode": is_in_torch_dispatch_mode()}
