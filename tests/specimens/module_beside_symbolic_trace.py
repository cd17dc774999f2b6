"""An eager nn.Module of an unrelated thread dies while another thread traces.

symbolic_trace patches nn.Module.__call__ for the whole process.
"""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="10: pytorch#187589, #112775",
    state="module-call",
    symptom="NameError: module is not installed as a submodule",
    expect={"2.9": Shows("raised", raises={"thread-1": "module is not installed as a submodule"})},
    schedule=("thread-0 trace.body", "thread-1 end", "thread-0 end"),
    guarded=Shows("raised", raises={"thread-1": "module is not installed as a submodule"}),
)


def program(compile):
    layer = torch.nn.Linear(2, 2)
    return [
        lambda: torch.fx.symbolic_trace(lambda x: x.sin()),
        lambda: layer(torch.ones(2)),
    ]
