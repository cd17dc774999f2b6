"""A recompile limit set in the main thread does not hold in a worker: it falls to eager."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="44, 45, 46: pytorch#186537",
    state="dynamo-config",
    symptom="torch._dynamo hit config.recompile_limit (8), although it was raised in main",
    expect={"2.9": Shows(), "2.12": Shows("silently eager")},
    absent={"2.9": "options are the process's before 2.12"},
    in_turn=False,
    unfix=("thread-config",),
    unfixed=Shows(),
)


def program(compile):
    torch._dynamo.config.recompile_limit = 64
    compiled = compile(lambda x: x.sin(), backend="eager", dynamic=False)

    def train():
        for length in range(2, 14):
            compiled(torch.ones(length))

    return [train]


def check(trial, results):
    torch._dynamo.config.recompile_limit = 8  # what the main thread has set is no finding
