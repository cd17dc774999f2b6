"""A trial under a control, a script with further points, or neither: each has a schedule."""

from __future__ import annotations

from typing import Any

import pytest

from harness import Control, Follow, Isolation, Preemptions, Schedule, Script, Trial
from harness.control import VARIABLE
from harness.crew import CrewError, Member

PLACE = r"torch.fx._symbolic_trace:_new_patcher@line:/^yield CURRENT_PATCHER/"


def trace(member: Member) -> None:
    import torch

    with member.step(0):
        torch.fx.symbolic_trace(lambda x: x + 1)


def trial(script: list[str] | None = None, lines: str | None = None) -> dict[str, Any]:
    """Two threads trace; runs isolated."""
    control = None if lines is None else Control(Follow(Schedule.parse(lines).lines))
    made = Trial(
        script=None if script is None else Script(script, patience=20), control=control, interval=0
    )
    with made as opened:
        opened.run(2, trace, start="staggered", after_step=0, name="t")
    return opened.record(canaries=False)


def text_of(record: dict[str, Any]) -> Schedule:
    return Schedule.parse(record["schedule"]["text"])


def test_a_script_can_name_points_on_demand_and_places(isolation: Isolation) -> None:
    script = ["t-0 patch.install", f"t-0 {PLACE}", "t-1 step.begin", f"t-1 {PLACE}"]
    record = isolation.run(trial, {"script": script}).value
    assert record["script"]["missed"] is None and record["script"]["passed"] == script
    assert text_of(record).facts["how"] == "scripted"


def test_a_script_names_a_point_that_is_never_reached_and_is_missed(isolation: Isolation) -> None:
    record = isolation.run(trial, {"script": ["t-0 annotate.tested"]}).value
    assert "never reached" in record["script"]["missed"]


def test_a_free_run_has_a_schedule_of_the_crew_alone(isolation: Isolation) -> None:
    record = isolation.run(trial).value
    schedule = text_of(record)
    assert schedule.facts["how"] == "free" and not record["schedule"]["controlled"]
    assert {thread for thread, _ in schedule.trace} == {"t-0", "t-1"}
    assert ("t-0", "trace.body") in schedule.trace
    assert not any(point.startswith("patch.") for _, point in schedule.trace), "not installed"


def test_a_control_decides_who_begins_whatever_the_start_pattern(isolation: Isolation) -> None:
    lines = "schedule v1\nt-1 trace.begin\nt-0 end\nt-1 end\n"
    record = isolation.run(trial, {"lines": lines}).value
    assert record["script"]["missed"] is None and record["schedule"]["controlled"]
    assert [str(line) for line in text_of(record).lines] == [
        "t-1 trace.begin",
        "t-0 end",
        "t-1 end",
    ]
    assert {"torch", "python", "how", "points"} <= text_of(record).facts.keys()


def test_the_environment_takes_the_place_of_the_script(isolation: Isolation) -> None:
    spec = '{"strategy": "preemptions", "deviations": {"0": "t-1"}}'
    record = isolation.run(
        trial, {"script": ["t-0 annotate.tested"]}, environment={VARIABLE: spec}
    ).value
    assert record["script"]["missed"] is None
    assert [str(line) for line in text_of(record).lines] == ["t-1 end", "t-0 end"]


def test_a_trial_has_a_script_or_a_control() -> None:
    with pytest.raises(CrewError, match="not both"):
        Trial(script=Script([]), control=Control(Preemptions()))
