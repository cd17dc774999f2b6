"""A real trial's timeline has every stage that its backend passes."""

from __future__ import annotations

from typing import Any

from harness.report.lanes import timeline
from harness.report.trace_events import trace_events


def compiles_and_runs_backward() -> dict[str, Any]:
    """In its own process: one thread, two steps, a backend that needs no compiler."""
    import torch

    from harness import Trial

    torch.set_num_threads(1)
    with Trial() as trial:
        compiled = torch.compile(lambda x: (x.sin() * 2).sum(), backend="aot_eager")
        x = torch.ones(3, requires_grad=True)

        def work(member: Any) -> None:
            for number in range(2):
                with member.step(number):
                    compiled(x).backward()

        trial.run(1, work, deadline=60)
    return trial.record()


def test_every_stage_is_drawn(isolation):
    record = isolation.run(compiles_and_runs_backward).record()
    drawn = timeline(record)
    assert drawn is not None, record["process"]
    (lane,) = [lane for lane in drawn.lanes if lane.thread == "drafter-0"]
    found = [span.stage for span in lane.spans]
    for stage in ("step", "compiling", "lock", "dynamo", "aot", "trace", "flag", "warm"):
        assert stage in found, stage
    assert found.count("backward") == 2, "what AOT autograd traces is not a backward that runs"
    names = {one["name"] for one in trace_events(record, "x")["traceEvents"]}
    assert {"AOT autograd", "backward", "trace with the flag up"} <= names
