"""The silent order of the same pair: the annotation stays, and marks all later graphs."""

from __future__ import annotations

import torch.fx.traceback
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="none found (pytorch#184917 is about the same dictionary)",
    state="traceback-meta",
    symptom="none: {'custom': {...}} stays, in the metadata of every later graph",
    expect={"2.11": Shows("sticky state", stuck=("traceback-meta",))},
    schedule=(
        "thread-0 annotate.body",
        "thread-1 annotate.body",
        "thread-0 end",
        "thread-1 end",
    ),
)


def program(compile):
    def block(number):
        with torch.fx.traceback.annotate({"stage": number}):
            pass

    return [lambda: block(0), lambda: block(1)]
