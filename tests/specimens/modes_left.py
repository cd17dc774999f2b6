"""Two dispatch modes that cross leave the process's flags up.

On torch whose dynamo reads the flags, nothing is compiled any more.
"""

from __future__ import annotations

from specimen import Shows, Specimen
from torch.utils._python_dispatch import TorchDispatchMode

SPECIMEN = Specimen(
    rows="40; no public report of the stuck flags found",
    state="dispatch-mode",
    symptom="torch.compile captures nothing any more (on 2.9); since then two flags that lie",
    expect={
        "2.9": Shows(
            "silently eager",
            stuck=("dispatch-mode", "dispatch-mode-outside", "dispatch-mode-compiled"),
        ),
        "2.11": Shows(later={"is_in_torch_dispatch_mode": True}),
    },
    absent={"2.11": "the flags stay up, but dynamo asks the thread's own stack of modes"},
    schedule=(
        "thread-0 race_specimen_modes_left:inside@entry",
        "thread-1 race_specimen_modes_left:inside@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_modes_left:inside@entry",),
    unfix=("dispatch-mode-stack",),
    unfixed=Shows(
        "silently eager",
        stuck=("dispatch-mode", "dispatch-mode-outside", "dispatch-mode-compiled"),
    ),
    canaries=True,
    guarded=Shows(
        "silently eager", stuck=("dispatch-mode", "dispatch-mode-outside", "dispatch-mode-compiled")
    ),
)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def inside():
    pass


def program(compile):
    def block():
        with Mode():
            inside()

    return [block, block]


def afterwards():
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    return {"is_in_torch_dispatch_mode": is_in_torch_dispatch_mode()}
