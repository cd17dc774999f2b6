"""Victim, culprit, overlap; and the counterfactual, which a mere coincidence does not survive."""

from __future__ import annotations

import os
import threading
from typing import Any

import controls
import pytest

from harness import cause
from harness.cause import (
    Change,
    Count,
    Counterfactual,
    Region,
    bound,
    counterfactual,
    explain,
    swap,
)
from harness.crew import Member
from harness.isolate import Isolation
from harness.points import Event
from harness.schedule import Script
from harness.trial import Trial

RUNS = 3

# -- programs ------------------------------------------------------------------------------------


def two_die() -> dict[str, Any]:
    """Two warm threads are inside their wrapper while a third one traces; each dies."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    script = Script(
        [
            "drafter-0 step.end step=0",
            "drafter-1 step.end step=0",
            "tracer trace.begin",
            "tracer trace.body",
            *(
                f"drafter-{index} {point} step=1"
                for index in (0, 1)
                for point in ("call.arrive", "call.settled")
            ),
            "tracer trace.end",
        ],
        patience=20,
    )
    with Trial(unfix=["fx-tracing-flag"], script=script, interval=0) as trial:
        compiled = torch.compile(lambda x: x * 2, backend="eager")
        trial.add_thread("tracer", lambda _: make_fx(torch.sin)(torch.ones(2)))

        def work(member: Member) -> None:
            for step in range(2):
                with member.step(step):
                    compiled(torch.ones(2))

        trial.run(2, work, start="staggered", after_step=0, deadline=60)
    return trial.record()


def annotations() -> dict[str, Any]:
    """The live one: two annotations that overlap; the second to leave finds nothing."""
    import torch.fx.traceback as fx_traceback

    script = Script(
        [
            f"drafter-{index} annotate.{point}"
            for point in ("tested", "write", "body", "end")
            for index in (0, 1)
        ],
        patience=20,
    )
    with Trial(script=script, interval=0) as trial:

        def work(_: Member) -> None:
            with fx_traceback.annotate({"a": 1}):
                pass

        trial.run(2, work, start="together", deadline=60)
    return trial.record()


def dies_alone() -> dict[str, Any]:
    """A failure that has nothing to do with the thread that traces beside it."""
    import torch

    script = Script(
        ["tracer trace.body", "drafter-0 call.arrive", "drafter-0 call.exit", "tracer trace.end"],
        patience=20,
    )
    with Trial(script=script, interval=0) as trial:
        trial.add_thread("tracer", lambda _: torch.fx.symbolic_trace(lambda x: x + 1))

        def own(_: Any, __: Any) -> Any:
            raise ZeroDivisionError("of its own")

        compiled = torch.compile(lambda x: x * 2, backend=own)
        trial.run(1, lambda _: compiled(torch.ones(2)), deadline=60)
    return trial.record()


# -- who -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(isolation: Isolation) -> dict[str, Any]:
    result = isolation.run(two_die, deadline=100)
    assert result.ended == "returned", result.error
    return result.record()


def test_every_victim_is_named_with_the_culprit_its_stack_and_the_overlap(
    record: dict[str, Any],
) -> None:
    found = {entry["victim"]: entry for entry in record["cause"] if entry["victim"]}
    assert found.keys() == {"drafter-0", "drafter-1"}
    for victim, entry in found.items():
        assert (entry["culprit"], entry["state"]) == ("tracer", "fx-tracing-flag")
        assert entry["point"] == "trace.body"
        assert "two_die" in {frame["function"] for frame in entry["written"]} or any(
            "proxy_tensor" in frame["file"] for frame in entry["written"]
        )
        assert entry["stack"], "where the culprit was when the victim failed"
        overlap = entry["overlap"]
        assert 0 < overlap["seconds"] == pytest.approx(overlap["end"] - overlap["begin"], abs=1e-5)
        holder = record["watch"]["holders"][victim]
        assert holder["since"] <= overlap["begin"] <= holder["failed_at"] <= holder["until"]


def test_the_lines_say_it_in_words(record: dict[str, Any]) -> None:
    first, second = cause.lines(record)
    assert first.startswith("drafter-0 died of RuntimeError: Detected that you are using FX")
    assert "; fx-tracing-flag was written last by tracer, at trace.body, torch/" in first
    assert " ms, from " in first and second.startswith("drafter-1 died of RuntimeError")
    assert cause.lines(record | {"cause": []}) == [first, second], "a function of the record"


def test_an_annotation_is_blamed_on_who_took_it_away(isolation: Isolation) -> None:
    record = isolation.run(annotations, deadline=100).record()
    (entry,) = [entry for entry in record["cause"] if entry["victim"]]
    assert (entry["state"], entry["point"]) == ("traceback-meta", "annotate.left")
    assert {entry["victim"], entry["culprit"]} == {"drafter-0", "drafter-1"}
    assert entry["overlap"]["seconds"] > 0


def test_a_stuck_state_is_blamed_on_its_last_writer(isolation: Isolation) -> None:
    record = isolation.run(controls.left_patched, deadline=100).record()
    entries = [entry for entry in record["cause"] if entry["state"] == "module-call"]
    assert [entry["victim"] for entry in entries] == [None]
    assert entries[0]["culprit"] in ("drafter-0", "drafter-1")
    assert entries[0]["point"] == "trace.left"
    assert entries[0]["text"].startswith("module-call stays ")


def made(*, holder: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    error = {"type": "builtins.KeyError", "message": "x", "frames": []} | more.pop("error", {})
    outcome = {"thread": "victim", "state": "raised", "error": error, "stack": []}
    watch = {"holders": {"victim": holder} if holder else {}, "writes": more.pop("writes", {})}
    return {"outcomes": [outcome], "watch": watch} | more


def test_what_nobody_is_known_to_have_written_is_said_to_be_unknown() -> None:
    (entry,) = explain(made())
    assert entry["culprit"] is None
    assert entry["text"] == "victim died of KeyError: x; who wrote the state last is not known"
    (entry,) = explain(made(error={"message": "CURRENT_PATCHER is None in finally block"}))
    assert "(fx-patcher); who wrote the state last is not known" in entry["text"]


def test_nobody_is_blamed_for_its_own_write() -> None:
    own = {"thread": "victim", "point": "trace.left", "t": 1.0, "step": None, "stack": []}
    other = own | {"thread": "other", "t": 0.5}
    error = {"message": "CURRENT_PATCHER is None"}
    (entry,) = explain(made(error=error, writes={"fx-patcher": [other, own]}))
    assert (entry["culprit"], entry["point"]) == ("other", "trace.left")
    (entry,) = explain(made(error=error, writes={"fx-patcher": [own]}))
    assert entry["culprit"] is None


def test_a_write_after_the_failure_is_not_its_cause() -> None:
    times = {"since": 1.0, "until": 3.0, "victim_since": 1.5, "failed_at": 2.0}
    holder = {"thread": "culprit", "state": "fx-tracing-flag", "stack": [], "step": 4} | times
    writes = [
        {"thread": "culprit", "point": "trace.body", "t": 1.2, "step": 4, "stack": []},
        {"thread": "culprit", "point": "trace.left", "t": 3.0, "step": 4, "stack": []},
    ]
    (entry,) = explain(made(holder=holder, writes={"fx-tracing-flag": writes[:1]}))
    assert entry["point"] == "trace.body" and entry["culprit_step"] == 4
    (entry,) = explain(made(holder=holder, writes={"fx-tracing-flag": writes}))
    assert entry["point"] == "trace.body"
    assert entry["overlap"] == {"begin": 1.5, "end": 2.0, "seconds": 0.5, "failed": 2.0}


# -- the counterfactual --------------------------------------------------------------------------


def test_swapped_and_with_a_lock_the_race_is_gone(isolation: Isolation) -> None:
    found = counterfactual(controls.thread_dies, isolation=isolation, runs=RUNS, deadline=60)
    assert str(found.as_it_is) == f"{RUNS} of {RUNS}"
    assert str(found.swapped) == str(found.locked) == f"0 of {RUNS}"
    assert found.shown and found.met == 0
    *causes, counts, worth = found.lines()
    assert causes and causes[0].startswith("drafter-0 died of RuntimeError")
    assert counts == f"as it is {RUNS} of {RUNS}; swapped 0 of {RUNS}; with a lock 0 of {RUNS}"
    assert worth == f"bound: 0 of {RUNS}: with 95 % confidence below 63 %"
    assert cause.VARIABLE not in os.environ


def test_the_same_for_two_annotations(isolation: Isolation) -> None:
    found = counterfactual(annotations, isolation=isolation, runs=RUNS, deadline=60)
    assert found.shown, found.lines()


def test_a_coincidence_does_not_survive(isolation: Isolation) -> None:
    """The negative control: it dies whatever the other thread does, so that is not the cause."""
    found = counterfactual(dies_alone, isolation=isolation, runs=2, deadline=60)
    assert not found.shown
    assert found.locked.failed == 2


def test_where_nothing_fails_there_is_no_cause_to_look_for(isolation: Isolation) -> None:
    with pytest.raises(ValueError, match=r"nothing fails: 0 of 2: .* no cause to look for"):
        counterfactual(controls.completed, isolation=isolation, runs=2)
    with pytest.raises(ValueError, match="at least 1 run"):
        counterfactual(controls.completed, isolation=isolation, runs=0)


def test_it_is_shown_only_if_it_always_fails_and_never_without_the_overlap() -> None:
    always, never = Count(5, 5), Count(5, 0)
    assert Counterfactual(always, never, never).shown
    assert Counterfactual(always, None, never).shown
    assert not Counterfactual(Count(5, 4), never, never).shown
    assert not Counterfactual(Count(5, 5, missed=1), never, never).shown
    assert not Counterfactual(always, Count(5, 1), never).shown
    assert not Counterfactual(always, never, Count(5, 1)).shown
    assert not Counterfactual(always, Count(5, 0, missed=1), never).shown
    assert not Counterfactual(always, never, never, met=1).shown
    assert "no script to swap" in Counterfactual(always, None, never).lines()[0]
    assert str(Count(5, 0, missed=2)) == "0 of 5 (2 missed their script)"


def test_a_swap_holds_the_culprit_before_its_trace_and_not_inside_it() -> None:
    steps = [
        "drafter-0 step.end step=0",
        "tracer trace.begin",
        "tracer trace.body",
        "drafter-0 call.arrive step=1",
        "drafter-0 call.settled step=1",
        "tracer trace.end",
    ]
    assert swap(steps, "drafter-0", "tracer") == [
        "drafter-0 step.end step=0",
        "drafter-0 call.arrive step=1",
        "drafter-0 call.settled step=1",
        "drafter-0 call.exit step=1",
        "tracer trace.begin",
        "tracer trace.body",
        "tracer trace.end",
    ]
    del steps[1]
    assert swap(steps, "drafter-0", "tracer")[4:6] == ["tracer trace.begin", "tracer trace.body"]


def test_a_script_without_the_two_cannot_be_swapped() -> None:
    for steps in ([], ["a step.begin", "b trace.body"], ["a trace.body"]):
        with pytest.raises(ValueError, match="does not have a and b inside anything"):
            swap(steps, "a", "b")


@pytest.mark.parametrize(
    ("failed", "runs", "percent"),
    [(0, 20, "14"), (0, 300, "0.99"), (1, 20, "22"), (20, 20, "1e+02"), (0, 1, "95")],
)
def test_the_bound_is_the_exact_one(failed: int, runs: int, percent: str) -> None:
    """Clopper and Pearson's upper end, one-sided, 95 %."""
    assert bound(failed, runs).endswith(f"below {percent} %")


@pytest.mark.parametrize("count", [(1, 0), (-1, 5), (6, 5)])
def test_what_is_no_count_has_no_bound(count: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not a count"):
        bound(*count)


def test_the_region_s_lock_is_reentrant_and_given_back_when_left() -> None:
    region = Region()
    entered, inside = threading.Event(), []

    def other() -> None:
        entered.set()
        region.arrive(Event("trace.begin", "other"))
        inside.append("other")
        region.leave(Event("trace.left", "other"))

    region.leave(Event("annotate.left", "me"))  # never entered: nothing to give back
    for point in ("call.arrive", "trace.begin"):
        region.arrive(Event(point, "me"))
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    region.leave(Event("trace.left", "me"))
    assert inside == [], "still inside its call"
    region.leave(Event("call.exit", "me"))
    thread.join(10)
    assert inside == ["other"] and region.failed is None


def test_a_lock_that_cannot_be_had_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause, "_LOCK_PATIENCE", 0.05)
    region = Region()
    region.arrive(Event("call.arrive", "holder"))
    thread = threading.Thread(target=region.arrive, args=(Event("trace.begin", "late"),))
    thread.start()
    thread.join(10)
    assert region.failed == "late could not have the region's lock at trace.begin"


def test_a_change_travels_in_the_environment() -> None:
    change = Change(("a trace.body",), lock=True)
    with cause._changed(change):
        assert cause.change_from(os.environ) == change
    assert cause.change_from(os.environ) is None
