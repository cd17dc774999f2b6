"""torch._dynamo.reset() frees the cache that another thread's lookup walks."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="26: pytorch#196120",
    state="the list of cache entries of a code object",
    symptom="segmentation fault",
    expect={"2.13": Shows("native crash")},
    schedule=(
        "thread-0 race_specimen_reset_beside_lookup:Constant.__eq__@entry",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("race_specimen_reset_beside_lookup:Constant.__eq__@entry",),
    guarded=Shows("native crash"),
)


class Constant:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __fx_repr__(self):
        return f"Constant({self.value})", {"Constant": Constant}


def program(compile):
    from torch._library.opaque_object import MemberType, register_opaque_type

    register_opaque_type(Constant, typ="value", members={"value": MemberType.USE_REAL})
    warm = compile(lambda x, c: x * c.value, backend="eager", dynamic=False)
    x = torch.ones(2)
    for value in (1, 2):
        warm(x, Constant(value))
    return [lambda: warm(x, Constant(1)), torch._dynamo.reset]
