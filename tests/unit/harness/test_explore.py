"""The search finds what it is not told of, forced schedules force, and both can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch.fx._symbolic_trace as st

from harness import cli, search_command
from harness.capture import CapturedError
from harness.explore import PRELOADED, ExploreError, Runner, Target, explore
from harness.isolate import Isolation, IsolationError
from harness.replay import Schedule, ScheduleError
from harness.shrink import shrink
from harness.verdict import findings, judge

# torch 2.14 made the flag thread-local; the patched nn.Module stays behind on all versions.
FLAG_IS_SHARED = hasattr(st, "_is_fx_tracing_flag")
STUCK = "fx-tracing-flag" if FLAG_IS_SHARED else "module-call"
FILE = str(Path(programs.__file__).resolve())


@pytest.fixture(scope="module")
def isolation() -> Iterator[Isolation]:
    with Isolation(preload=PRELOADED) as opened:
        yield opened


def force(isolation: Isolation, name: str, *lines: str, **options: Any) -> dict[str, Any]:
    """The record of a program under a schedule written by hand."""
    schedule = Schedule.parse("\n".join(("schedule v1", *lines)))
    record = Runner(Target(FILE, name, **options), isolation).replay(schedule)
    assert record["script"]["missed"] is None
    return record


def errors(record: dict[str, Any]) -> dict[str, CapturedError]:
    return {o["thread"]: o["error"] for o in record["outcomes"] if o["error"] is not None}


# -- the search ----------------------------------------------------------------------------------


def test_overlapping_traces_are_found_without_being_told_where_and_shrunk(isolation) -> None:
    stuck = search_command.stuck(STUCK)
    found = explore(programs.two_traces, failing=stuck, isolation=isolation, budget_seconds=60)
    assert found.outcome == "found" and found.controlled, str(found)
    assert found.schedule is not None and found.errors == []
    runner = Runner(Target.of_schedule(found.schedule), isolation)
    small = shrink(found.schedule, runner.replay, stuck)
    assert small.holds and small.schedule.switches <= 3, str(small.schedule)


def test_a_long_schedule_is_shrunk_to_its_switches(isolation) -> None:
    """Padded with switches that change nothing, it comes down to three again."""
    record = force(
        isolation,
        "two_traces",
        "thread-1 trace.begin",
        "thread-0 step.begin",
        "thread-1 patch.install",
        "thread-0 trace.body",
        "thread-1 trace.end",
        "thread-0 trace.end",
        "thread-1 end",
        "thread-0 end",
    )
    stuck = search_command.stuck(STUCK)
    assert stuck(record) and record["schedule"]["switches"] == 7
    runner = Runner(Target(FILE, "two_traces"), isolation)
    small = shrink(Schedule.parse(record["schedule"]["text"]), runner.replay, stuck)
    assert small.before == 7 and small.schedule.switches <= 3 and small.holds


def test_what_does_not_fail_cannot_be_shrunk(isolation) -> None:
    runner = Runner(Target(FILE, "two_traces"), isolation)
    schedule = Schedule.parse("schedule v1\nverdict: raised\nthread-0 end\nthread-1 end\n")
    with pytest.raises(ValueError, match="its verdict is completed"):
        shrink(schedule, runner.replay)


def test_a_clean_result_names_its_bound(isolation) -> None:
    clean = explore(programs.one_trace_one_bystander, bound=1, isolation=isolation)
    assert clean.outcome == "clean" and clean.waiting == 0 and clean.tried > 5
    assert str(clean) == f"clean: {clean.tried} of {clean.tried} schedules with up to 1 preemptions"
    none = explore(programs.one_trace_one_bystander, bound=0, isolation=isolation)
    assert none.tried == 2, "two orders of two threads"


def test_a_budget_that_ends_is_no_clean_result(isolation) -> None:
    partly = explore(programs.two_traces, bound=2, budget_seconds=1e-6, isolation=isolation)
    assert partly.outcome == "inconclusive" and partly.waiting > 0
    assert str(partly).startswith("inconclusive: the budget ended after")


def test_random_priorities_over_the_lines_of_a_file_find_it_too(isolation) -> None:
    found = explore(
        programs.two_traces,
        strategy="pct",
        points=("torch/fx/_symbolic_trace.py:*", "lock.wait"),
        isolation=isolation,
    )
    assert found.outcome == "found" and found.controlled, str(found)
    assert found.schedule is not None and "_symbolic_trace.py:" in str(found.schedule.lines[0])


def test_a_deadlock_of_the_programs_own_locks_is_found(isolation) -> None:
    found = explore(programs.two_locks, bound=1, isolation=isolation, deadline=3)
    assert found.outcome == "found" and judge(found.record or {}) == "deadlock", str(found)
    assert found.controlled


def test_a_native_crash_is_found_though_it_leaves_no_schedule(isolation) -> None:
    found = explore(programs.crash_in_the_second_order, isolation=isolation)
    assert found.outcome == "found" and found.schedule is None and found.controlled is None
    assert judge(found.record or {}) == "native crash"
    assert str(found).endswith("SIGSEGV; it left no schedule that could be run again")


def test_a_crash_that_is_not_looked_for_makes_the_search_no_clean_one(isolation) -> None:
    stuck = search_command.stuck(STUCK)
    found = explore(programs.crash_in_the_second_order, failing=stuck, isolation=isolation)
    assert found.outcome == "harness error"
    assert found.errors[0].endswith("the process left no record: died by SIGSEGV")


def test_a_program_that_goes_another_way_each_time_is_not_called_clean(isolation, tmp_path) -> None:
    arguments = {"folder": str(tmp_path)}
    found = explore(
        programs.another_one_each_time, arguments=arguments, bound=1, isolation=isolation
    )
    assert found.outcome == "harness error", str(found)
    assert any(
        "uncontrolled: choice 3 is another one than in the run that it varies" in error
        for error in found.errors
    )


def test_a_program_is_loaded_as_python_would_load_its_file(isolation, tmp_path) -> None:
    (tmp_path / "race_neighbour.py").write_text("def work():\n    pass\n")
    file = tmp_path / "program.py"
    file.write_text("import race_neighbour\ndef program(): return [race_neighbour.work]\n")
    assert explore(Target(str(file), "program"), bound=0, isolation=isolation).outcome == "clean"
    file.write_text("def program(:\n")
    with pytest.raises(ExploreError, match=r"^program cannot run: SyntaxError: .*program.py, line"):
        explore(Target(str(file), "program"), bound=0, isolation=isolation)


def test_a_program_that_fails_by_itself_is_an_error_and_no_finding(isolation) -> None:
    with pytest.raises(ExploreError, match="broken cannot run: LookupError: no such data"):
        explore(programs.broken, isolation=isolation)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bound": -1}, "bound cannot be below 0"),
        ({"budget_seconds": 0}, "budget_seconds must be positive"),
        ({"strategy": "luck"}, "unknown strategy 'luck'"),
        ({"strategy": "pct", "depth": 0}, "depth counts from 1, not 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ExploreError, match=why):
        explore(programs.two_traces, **options)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a end", "no line 'target"),
        ("target: /no/where.py:f\na end", "does not exist"),
        (f"target: {FILE}:f\nkind: song\na end", "'kind' or 'options'"),
        (f"target: {FILE}:f\noptions: [\na end", "not JSON"),
    ],
)
def test_a_schedule_whose_target_cannot_be_run_is_refused(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Target.of_schedule(Schedule.parse(f"schedule v1\n{text}\n"))


# -- forced --------------------------------------------------------------------------------------

CROSSWISE = ("thread-0 trace.body", "thread-1 trace.body", "thread-0 end", "thread-1 end")


def test_a_compile_beside_make_fx_is_forced_and_loud(isolation) -> None:
    record = force(isolation, "compile_beside_trace", *CROSSWISE)
    assert "CURRENT_PATCHER is None" in errors(record)["thread-1"]["message"]
    assert any("module-call" in finding.what for finding in findings(record))


def test_in_another_order_it_is_silent_and_nn_module_stays_patched(isolation) -> None:
    """thread-0 is stopped between its patcher and its patches, and shares thread-1's."""
    record = force(
        isolation,
        "compile_beside_trace",
        "thread-0 patch.enter",
        "thread-1 trace.body",
        "thread-0 trace.body",
        "thread-1 end",
        "thread-0 end",
        canaries=True,
    )
    assert errors(record) == {} and judge(record) in ("sticky state", "silently eager")
    assert any("module-call" in finding.what for finding in findings(record))


def test_properly_nested_it_is_harmless(isolation) -> None:
    """The true negative: one inside the other, as a nest of traces in one thread."""
    record = force(
        isolation,
        "two_traces",
        "thread-0 trace.body",
        "thread-1 end",
        "thread-0 end",
        canaries=True,
    )
    assert judge(record) == "completed"


def test_two_masks_lose_an_annotation(isolation) -> None:
    if "annotate" not in _source_of_masks():
        pytest.skip("on this torch, building a BlockMask does not annotate")
    record = force(
        isolation,
        "two_masks",
        "thread-0 annotate.tested",
        "thread-1 annotate.body",
        "thread-0 end",
        "thread-1 end",
    )
    assert errors(record).keys() == {"thread-1"}
    assert errors(record)["thread-1"]["type"].endswith("KeyError")


def _source_of_masks() -> str:
    import inspect

    from torch.nn.attention import flex_attention as flex

    return inspect.getsource(flex._dense_to_ordered)


FIRST_FAILURE = ("thread-1 trace.body", "thread-0 end", "thread-2 end", "thread-1 end")


def test_the_first_failure_is_forced_where_the_flag_is_seen(isolation) -> None:
    record = force(
        isolation,
        "warm_beside_recompile",
        *FIRST_FAILURE,
        unfix=("fx-tracing-flag",),
        arguments={"steps": 1},
    )
    assert errors(record).keys() == {"thread-0", "thread-2"}
    for error in errors(record).values():
        assert "FX to symbolically trace a dynamo-optimized function" in error["message"]
        assert error["frames"][-1]["function"] == "compile_wrapper"


def test_two_compiles_wait_for_each_other_and_nobody_is_held_in_the_lock(isolation) -> None:
    schedule = Schedule.parse("schedule v1\nthread-0 trace.body\nthread-1 end\nthread-0 end\n")
    runner = Runner(Target(FILE, "two_compiles"), isolation)
    record = runner.replay(schedule)
    assert "thread-1 cannot run here" in record["script"]["missed"]
    assert judge(record) == "completed" and record["schedule"]["blocked"] == []
    assert "thread-1 lock.wait\nthread-0 end" in record["schedule"]["text"]


def test_every_run_has_a_schedule_and_a_second_one_passes_the_same_trace(isolation) -> None:
    runner = Runner(Target(FILE, "two_compiles"), isolation)
    first = runner.run({"strategy": "pct", "seed": 5, "depth": 3, "length": 25})
    again = runner.replay(Schedule.parse(first["schedule"]["text"]))
    assert again["schedule"]["controlled"] and again["script"]["missed"] is None
    other = Runner(Target(FILE, "two_masks"), isolation)
    parted = other.replay(Schedule.parse(first["schedule"]["text"]))
    assert not parted["schedule"]["controlled"]
    assert "the traces part at point" in parted["schedule"]["parted"]


# -- commands ------------------------------------------------------------------------------------


def test_the_commands_find_replay_and_shrink(tmp_path: Path) -> None:
    out = tmp_path / "found.schedule"
    options: dict[str, Any] = {
        "bound": 2,
        "budget": 60.0,
        "strategy": "pct",
        "points": (),
        "unfix": (),
        "state": STUCK,
        "out": out,
    }
    found = search_command.explore(f"{FILE}:two_traces", **options)
    assert found.code == 1 and f"replay: harness replay {out}" in found.text
    again = search_command.replay(out)
    assert again.code == 1 and "the trace is the recorded one" in again.text
    small = search_command.shrink(out, state=STUCK, out=None)
    assert small.code == 0 and "the result holds" in small.text
    assert (tmp_path / "found.small.schedule").exists()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: search_command.explore("nowhere.py:f", **_options()), "is not FILE:FUNCTION"),
        (lambda: search_command.explore(f"{FILE}:f", **_options(unfix=["x"])), "unknown unfix"),
        (lambda: search_command.explore(f"{FILE}:f", **_options(points=["x"])), "no point is"),
        (lambda: search_command.explore(f"{FILE}:f", **_options(state="x")), "no probe is called"),
        (lambda: search_command.explore(f"{FILE}:f", **_options(out=Path("/"))), "cannot be writ"),
        (lambda: search_command.replay(Path("absent")), "cannot be read"),
    ],
)
def test_the_commands_refuse_bad_input(call: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call()


def _options(**other: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "bound": 0,
        "budget": 1.0,
        "strategy": "pct",
        "points": (),
        "unfix": (),
        "state": None,
        "out": Path("never.schedule"),
    }
    return plain | other


def test_a_server_that_cannot_start_is_one_line_and_exit_code_2(monkeypatch, capsys) -> None:
    def search(*_: Any, **__: Any) -> None:
        raise IsolationError("the fork server cannot start: cannot import torch: OSError")

    monkeypatch.setattr(search_command, "search", search)
    monkeypatch.setattr("sys.argv", ["harness", "explore", f"{FILE}:two_traces"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and "cannot import torch" in said and "\n" not in said
