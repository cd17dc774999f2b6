"""Two calls that cross under skip_guard_eval_unsafe leave guards switched off."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="25: pytorch#196637",
    state="skip-guards",
    symptom="skip_guard_eval_unsafe stays set when everybody has left it",
    expect={"2.9": Shows("sticky state", stuck=("skip-guards",)), "2.15": Shows()},
    absent={"2.15": "the flag is per thread"},
    schedule=("thread-0 call.checked", "thread-1 call.checked", "thread-0 end", "thread-1 end"),
    points=("call.checked",),
    guarded={"2.9": Shows("sticky state", stuck=("skip-guards",)), "2.15": Shows()},
)


def program(compile):
    warm = [compile(f, backend="eager") for f in (lambda x: x.sin(), lambda x: x.cos())]
    for function in warm:
        function(torch.ones(2))

    def unsafe():
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            warm[0](torch.ones(2))

    return [unsafe, lambda: warm[1](torch.ones(2))]
