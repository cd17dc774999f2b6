"""A lookup misses a valid cache entry because another thread moves it to the front.

Evaluating a guard can run Python (here: the ``__eq__`` of a constant) and takes a mutex of the
entry. thread-1 waits for that of the first entry; meanwhile thread-0 finds the second one and
moves it to the front. When thread-1 goes on, what it looked for is behind it.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="26: pytorch#193697, #195355, #196120",
    state="the list of cache entries of a code object",
    symptom="a warm function compiles again",
    expect={"2.13": Shows("spurious recompile")},
    schedule=(
        "thread-0 race_specimen_false_miss:Constant.__eq__@entry",
        "thread-1 blocked",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_false_miss:Constant.__eq__@entry",),
    guarded=Shows("spurious recompile"),
)

COMPILES: list[int] = []


class Constant:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __fx_repr__(self):
        return f"Constant({self.value})", {"Constant": Constant}


def backend(graph, _inputs):
    COMPILES.append(1)
    return graph.forward


def program(compile):
    from torch._library.opaque_object import MemberType, register_opaque_type

    register_opaque_type(Constant, typ="value", members={"value": MemberType.USE_REAL})
    warm = compile(lambda x, c: x * c.value, backend=backend, dynamic=False)
    x = torch.ones(2)
    for value in (1, 2):  # the entry of 2 is the second in the list
        warm(x, Constant(value))
    warm(x, Constant(1))
    return [lambda: warm(x, Constant(2)), lambda: warm(x, Constant(2))]


def check(trial, results):
    trial.expect_compiles({"warm": 2}, {"warm": len(COMPILES)})
