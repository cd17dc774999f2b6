"""Two preserve_node_meta blocks that cross leave it switched on."""

from __future__ import annotations

import torch.fx.traceback
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="12: pytorch#184917",
    state="traceback-preserve",
    symptom="all later graphs keep metadata, of whoever wrote it",
    expect={"2.9": Shows("sticky state", stuck=("traceback-preserve",))},
    schedule=(
        "thread-0 race_specimen_preserve_meta_left:inside@entry",
        "thread-1 race_specimen_preserve_meta_left:inside@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_preserve_meta_left:inside@entry",),
)


def inside():
    pass


def program(compile):
    def block():
        with torch.fx.traceback.preserve_node_meta():
            inside()

    return [block, block]
