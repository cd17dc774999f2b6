"""One trial from end to end: its record is plain data, and it holds what the verdict needs."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx

from harness import Expectation, Member, Script, Trial, Verdict, judge
from harness.isolate import Isolation

# A warm call of drafter-0 is checked while another thread is in the body of its trace.
TRACE_BESIDE_WARM_CALL = (
    "drafter-0 step.end step=0",
    "tracer trace.begin",
    "tracer trace.body",
    "drafter-0 call.arrive step=1",
    "drafter-0 call.settled step=1",
    "tracer trace.end",
)
DANGER = Expectation(
    Verdict.RAISED,
    exception="RuntimeError",
    message="FX to symbolically trace",
    frame="torch/_dynamo/eval_frame.py:compile_wrapper",
    state="fx-tracing-flag",
    exposed=("fx-trace",),
)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _trace(_: Member) -> None:
    torch.fx.symbolic_trace(_double)


def forced(*, script: list[str] | None, traces: bool, unfix: list[str]) -> dict[str, Any]:
    """Two steps of one compiled function, and perhaps a thread that traces beside them."""
    steps = None if script is None else Script(script, patience=20)
    with Trial(unfix=unfix, script=steps, interval=0.005) as trial:
        compiled = torch.compile(_double, backend="eager")
        if traces:
            trial.add_thread("tracer", _trace)

        def work(member: Member) -> None:
            for number in range(2):
                with member.step(number):
                    compiled(torch.ones(2))

        trial.run(1, work, deadline=60)
    return trial.record()


def left_behind(*, what: str) -> dict[str, Any]:
    """Nobody raises; something is wrong all the same."""
    forever = threading.Event()
    with Trial(interval=0) as trial:

        def work(member: Member) -> Any:
            with member.step(0):
                if what == "patched":
                    torch.nn.Module.__call__ = lambda self, *args: self.forward(*args)
                elif what == "eager":
                    q = torch.ones(1, 1, 16, 16)
                    torch.nn.attention.flex_attention.flex_attention(q, q, q)
                elif what == "stuck" and member.index == 1:
                    forever.wait()
            return threading.Lock()  # a result may be what cannot be copied

        trial.run(2, work, after_step=0, deadline=1 if what == "stuck" else 60)
        trial.expect_compiles({"f": 2}, {"f": 3 if what == "recompiled" else 2})
        trial.number("output", float("nan") if what == "nan" else 0.0, 1e-5)
        trial.note(guard="none")
        trial.note(proof="none either")
    return trial.record()


def twice() -> str:
    with Trial(interval=0) as trial:
        trial.run(1, lambda _: None, deadline=10)
        try:
            trial.run(1, lambda _: None, deadline=10)
        except ValueError as error:
            return str(error)
    return "not refused"


def run(isolation: Isolation, case: Any, **arguments: Any) -> dict[str, Any]:
    result = isolation.run(case, arguments, deadline=60)
    assert result.ended == "returned", result.error
    return result.record()


def test_a_forced_race_is_caught_by_its_own_exception_frame_state_and_holder(
    isolation: Isolation,
) -> None:
    """pytorch#126024, n of n: the warm thread dies, and the tracing thread is named."""
    record = run(
        isolation, forced, script=TRACE_BESIDE_WARM_CALL, traces=True, unfix=["fx-tracing-flag"]
    )
    assert DANGER.unmet(record) == []
    holder = record["watch"]["holders"]["drafter-0"]
    assert holder["thread"] == "tracer"
    assert "symbolic_trace" in {frame["function"] for frame in holder["stack"]}
    assert record["script"]["passed"] == list(TRACE_BESIDE_WARM_CALL)
    assert list(record["unfix"]) == ["fx-tracing-flag"]
    assert json.loads(json.dumps(record)) == record


def test_the_same_program_without_the_other_thread_is_clean_and_unexposed(
    isolation: Isolation,
) -> None:
    record = run(isolation, forced, script=None, traces=False, unfix=["fx-tracing-flag"])
    assert judge(record) is Verdict.COMPLETED
    assert Expectation(Verdict.COMPLETED, unexposed=("fx-trace",)).unmet(record) == []
    (line,) = Expectation(Verdict.COMPLETED, exposed=("fx-trace",)).unmet(record)
    assert "the danger was not there" in line
    assert record["watch"]["entries"] == {"drafter-0": 2}


def test_a_script_that_was_missed_is_never_a_pass(isolation: Isolation) -> None:
    script = ["drafter-0 call.exit step=1", "nobody trace.body"]
    record = run(isolation, forced, script=script, traces=False, unfix=[])
    assert judge(record) is Verdict.COMPLETED
    assert Expectation(Verdict.COMPLETED).unmet(record) == [
        "script missed: 'nobody trace.body' was never reached"
    ]


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        ("nothing", Verdict.COMPLETED),
        ("patched", Verdict.STICKY_STATE),
        ("eager", Verdict.SILENTLY_EAGER),
        ("recompiled", Verdict.SPURIOUS_RECOMPILE),
        ("nan", Verdict.WRONG_NUMBER),
        ("stuck", Verdict.DEADLOCK),
    ],
)
def test_an_exception_is_not_the_oracle(isolation: Isolation, what: str, verdict: Verdict) -> None:
    record = run(isolation, left_behind, what=what)
    assert judge(record) is verdict
    assert record["notes"] == {"guard": "none", "proof": "none either"}
    # What would be audited beside a live thread is not what is left, but what goes on.
    assert bool(record["probes"]) == bool(record["canaries"]) == (what != "stuck")


def test_a_trial_runs_one_crew(isolation: Isolation) -> None:
    """A second one would take the place of the first one's outcomes."""
    assert "runs one crew" in isolation.run(twice, deadline=60).value
