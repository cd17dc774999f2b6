"""One thread's skip_guard_eval_unsafe skips the guards of a call that is under way in another.

The second call has its own, safe setting already; the first one overwrites it.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="25: pytorch#196637",
    state="skip-guards",
    symptom="a stale entry is run for an input that its guards refuse: silently wrong numbers",
    expect={"2.9": Shows("wrong number"), "2.15": Shows()},
    absent={"2.15": "the flag is per thread"},
    schedule=(
        "thread-1 call.checked",
        "thread-0 call.checked",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("call.checked",),
    guarded={"2.9": Shows("wrong number"), "2.15": Shows()},
)


def program(compile):
    warm = compile(lambda x, n: x * n, backend="eager", dynamic=False)
    other = compile(lambda x: x.sin(), backend="eager")
    warm(torch.ones(2), 1)
    other(torch.ones(2))

    def unsafe():
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            other(torch.ones(2))

    return [unsafe, lambda: warm(torch.ones(2), 3)]


def check(trial, results):
    trial.number("1 times 3 in thread-1", float((results[1] - 3).abs().max()), 0.0)
