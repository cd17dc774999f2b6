"""Two blocks under set_stance that cross leave force_eager behind for every thread."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="33: pytorch#137504, #147983",
    state="stance",
    symptom="torch.compile captures nothing any more, in any thread, and says nothing",
    expect={"2.9": Shows("silently eager", stuck=("stance",))},
    schedule=(
        "thread-0 race_specimen_stance_left:inside@entry",
        "thread-1 race_specimen_stance_left:inside@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_stance_left:inside@entry",),
    canaries=True,
    guarded=Shows("silently eager", stuck=("stance",)),
)


def inside():
    pass


def program(compile):
    def block():
        with torch.compiler.set_stance("force_eager"):
            inside()

    return [block, block]
