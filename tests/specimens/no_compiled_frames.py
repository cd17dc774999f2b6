"""A warm fullgraph call is told that no frame of it was compiled.

Such a call counts compiled frames in one counter of the process and takes the counter down twice
when it ends. Between the two another thread begins to count; after the second, so does a third
call, from 0; the thread in the middle reads that 0.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="25: pytorch#196637",
    state="fullgraph-frames",
    symptom="RuntimeError: torch.compile with fullgraph=True found no compiled frames.",
    expect={
        "2.13": Shows(
            "spurious recompile",
            raises={"thread-1": "torch.compile with fullgraph=True found no compiled frames."},
        ),
        "2.15": Shows(),
    },
    absent={"2.15": "the flag is per thread"},
    schedule=(
        "thread-0 torch.utils._config_module:"
        "ConfigModule._make_closure_patcher.change.revert@entry",
        "thread-1 race_specimen_no_compiled_frames:run_graph@entry",
        "thread-0 call.checked nth=2",
        "thread-1 end",
        "thread-0 end",
    ),
    points=(
        "call.checked",
        "race_specimen_no_compiled_frames:run_graph@entry",
        "torch.utils._config_module:ConfigModule._make_closure_patcher.change.revert@entry",
    ),
    guarded={
        "2.13": Shows("spurious recompile", raises={"thread-1": "found no compiled frames"}),
        "2.15": Shows(),
    },
)


def run_graph(graph, args):
    return graph.forward(*args)


def backend(graph, _inputs):
    return lambda *args: run_graph(graph, args)


def program(compile):
    functions = (lambda x: x.sin(), lambda x: x.cos())
    warm = [compile(f, backend=backend, fullgraph=True, dynamic=False) for f in functions]
    for function in warm:
        function(torch.ones(2))

    def twice():
        warm[0](torch.ones(2))
        warm[0](torch.ones(2))

    return [twice, lambda: warm[1](torch.ones(2))]


def check(trial, results):
    trial.expect_compiles({"warm": 2}, {"warm": 2})
