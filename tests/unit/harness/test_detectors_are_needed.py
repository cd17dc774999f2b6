"""Every detector has a broken program that it alone catches: without it, the control is missed.

A detector that could be deleted without a test failing would be decoration. The table below is
complete by a test, each control is caught by its own detector and verdict, and with that detector
replaced by one that finds nothing the same record is not what the control must show any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import controls
import pytest

from harness import verdict
from harness.isolate import CaseResult, Isolation
from harness.verdict import DETECTORS, Detector, Verdict, findings, judge

Record = dict[str, Any]

# detector -> the broken program, the verdict, and words of the finding
CONTROLS: dict[str, tuple[Callable[..., Any], Verdict, str]] = {
    "process-died": (controls.segfault, Verdict.NATIVE_CRASH, "SIGSEGV"),
    "process-hung": (controls.hang, Verdict.DEADLOCK, "had not ended after its deadline"),
    "thread-stuck": (
        controls.lock_order,
        Verdict.DEADLOCK,
        "compile_lock is held by drafter-0, and waited for here",
    ),
    "import-race": (controls.half_imported, Verdict.RAISED, "another thread was importing"),
    "false-miss": (controls.missed_entry, Verdict.SPURIOUS_RECOMPILE, "missed a valid cache entry"),
    "false-no-frames": (
        controls.false_message,
        Verdict.SPURIOUS_RECOMPILE,
        "was told that there is none",
    ),
    "process-raised": (controls.case_raises, Verdict.RAISED, "ZeroDivisionError"),
    "thread-raised": (controls.thread_dies, Verdict.RAISED, "FX to symbolically trace"),
    "eager-flex": (
        controls.eager_flex,
        Verdict.SILENTLY_EAGER,
        "flex_attention uncompiled 1 times",
    ),
    "recompile-limit": (controls.limit_hit, Verdict.SILENTLY_EAGER, "hit config."),
    "no-graph": (controls.no_graphs, Verdict.SILENTLY_EAGER, "captured 0 graphs"),
    "compile-count": (controls.one_more_compile, Verdict.SPURIOUS_RECOMPILE, "2 times, planned 1"),
    "probe": (controls.left_patched, Verdict.STICKY_STATE, "module-call is "),
    "canary": (controls.broken_linear, Verdict.STICKY_STATE, "canary eager-linear"),
    "open-trace": (controls.open_trace, Verdict.STICKY_STATE, "ended with 1 open traces"),
    "number": (controls.other_numbers, Verdict.WRONG_NUMBER, "drafter-1 parameters differs"),
}
DEADLINES = {"process-hung": 2.0}


@pytest.fixture(scope="module")
def results(
    isolation: Isolation, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], CaseResult]:
    """Each control runs once; the judging is repeated."""
    done: dict[str, CaseResult] = {}

    def run(name: str) -> CaseResult:
        if name not in done:
            case = CONTROLS[name][0]
            arguments = {}
            if name == "import-race":
                arguments["folder"] = str(tmp_path_factory.mktemp("modules"))
            done[name] = isolation.run(case, arguments, deadline=DEADLINES.get(name, 100.0))
        return done[name]

    return run


def caught(name: str, record: Record) -> bool:
    """By its own verdict and in its own words; any other failure does not count."""
    _, wanted, words = CONTROLS[name]
    return judge(record) is wanted and any(
        finding.verdict is wanted and words in finding.what for finding in findings(record)
    )


def without(name: str) -> tuple[Detector, ...]:
    """The table with one detector that finds nothing."""

    def nothing(_record: Any) -> Iterator[str]:
        return iter(())

    return tuple(
        replace(detector, find=nothing) if detector.name == name else detector
        for detector in DETECTORS
    )


def test_every_detector_has_its_control() -> None:
    assert list(CONTROLS) == [detector.name for detector in DETECTORS]
    for detector in DETECTORS:
        assert CONTROLS[detector.name][1] is detector.verdict


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_caught_and_is_missed_without_its_detector(
    results: Callable[[str], CaseResult], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    result = results(name)
    record = result.record()
    assert caught(name, record), [str(finding) for finding in findings(record)] + [result.error]
    assert record.get("script", {}).get("missed") is None
    monkeypatch.setattr(verdict, "DETECTORS", without(name))
    assert not caught(name, record)


@pytest.mark.parametrize("removed", CONTROLS)
def test_no_other_detector_is_needed_for_a_control(
    results: Callable[[str], CaseResult], monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """So a control that is missed says which detector is gone."""
    for name in CONTROLS:
        if name != removed:
            record = results(name).record()
            with monkeypatch.context() as patch:
                patch.setattr(verdict, "DETECTORS", without(removed))
                assert caught(name, record), name


def test_a_clean_program_is_caught_by_none(isolation: Isolation) -> None:
    result = isolation.run(controls.completed, deadline=100)
    record = result.record()
    assert judge(record) is Verdict.COMPLETED, [str(finding) for finding in findings(record)]


def test_the_same_training_alone_has_the_reference_s_numbers(isolation: Isolation) -> None:
    """The true negative of the control ``number``: nobody compiles beside it."""
    record = isolation.run(controls.other_numbers, {"beside": False}, deadline=100).record()
    assert judge(record) is Verdict.COMPLETED, [str(finding) for finding in findings(record)]
    parts = {row["what"] for row in record["numbers"]}
    wanted = ("output", "gradients", "parameters", "optimizer")
    assert parts == {f"drafter-1 {part}" for part in wanted}


def test_a_deadlock_comes_with_all_stacks(results: Callable[[str], CaseResult]) -> None:
    record = results("thread-stuck").record()
    assert {"drafter-0", "drafter-1", "MainThread"} <= record["stacks"].keys()
    functions = [frame["function"] for frame in record["stacks"]["drafter-1"]]
    assert "compile_wrapper" in functions
    native = record["native_stacks"]
    assert native.startswith("no C stacks: py-spy ") or "drafter-1" in native
    assert record["probes"] == [], "what goes on is not what is left"
    (waits,) = [entry for entry in record["cause"] if entry["victim"] == "drafter-1"]
    assert waits["text"].endswith("it waits for the compile lock, which drafter-0 holds")


def test_a_native_crash_and_a_hang_come_with_a_dump(results: Callable[[str], CaseResult]) -> None:
    assert "Segmentation fault" in results("process-died").dump
    assert "hang" in results("process-hung").dump
