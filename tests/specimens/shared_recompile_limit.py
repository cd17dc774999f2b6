"""Two wrappers of one function share its cache, and its limit: the second one runs eager."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="91, 92: vllm#27178, pytorch#166153",
    state="the list of cache entries of a code object",
    symptom="torch._dynamo hit config.recompile_limit (8), though each wrapper has 6 shapes",
    expect={"2.9": Shows("silently eager")},
    schedule=("thread-0 end", "thread-1 end"),
    in_turn=False,
)


def _double(x):
    return x * 2


def program(compile):
    wrappers = [compile(_double, backend="eager", dynamic=False) for _ in range(2)]

    def train(which):
        for length in range(2, 8):
            wrappers[which](torch.ones(length + 10 * which))

    return [lambda: train(0), lambda: train(1)]
