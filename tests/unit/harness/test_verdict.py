"""The verdict is a function of the record alone, and an expectation can fail in every point."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from harness.verdict import DETECTORS, Expectation, Verdict, exposures, findings, judge

Record = dict[str, Any]

WRAPPER = {
    "file": "/v/site-packages/torch/_dynamo/eval_frame.py",
    "line": 1120,
    "function": "compile_wrapper",
}


def outcome(thread: str, state: str = "completed", **more: Any) -> Record:
    return {"thread": thread, "state": state, "error": None, "stack": []} | more


def died(thread: str, kind: str = "RuntimeError", text: str = "using FX", **frame: Any) -> Record:
    error = {"type": kind, "message": text, "frames": [WRAPPER | frame]}
    return outcome(thread, "raised", error=error)


def clean(*outcomes: Record, **more: Any) -> Record:
    """What a trial leaves in which nothing went wrong."""
    return {
        "process": {"ended": "returned", "what": "returned"},
        "outcomes": list(outcomes) or [outcome("drafter-0"), outcome("drafter-1")],
        "watch": {
            "eager_flex": {},
            "exposures": {"fx-trace": {}, "annotation": {}},
            "still_in_trace": {},
            "holders": {},
            "lock_owner": None,
        },
        "probes": [{"probe": "fx-patcher", "at_rest": True, "value": "None", "rest": "None"}],
        "canaries": {"eager-linear": None, "fresh-compile": None},
        "numbers": [{"what": "output", "difference": 1e-6, "tolerance": 1e-4}],
        "compiles": {"drafter-0": 2},
        "compiles_planned": {"drafter-0": 2},
        "script": {"missed": None},
    } | more


def number(difference: float, tolerance: float = 1e-4) -> Record:
    return {"numbers": [{"what": "output", "difference": difference, "tolerance": tolerance}]}


def watched(**more: Any) -> Record:
    return {"watch": clean()["watch"] | more}


PATCHED = {"probe": "module-call", "at_rest": False, "value": "wrapped", "rest": "plain"}
UNKNOWN = {"probe": "region-id", "at_rest": None, "value": "unknown", "rest": "unknown"}
STUCK = outcome("drafter-1", "unfinished", stack=[WRAPPER | {"function": "parked"}])
NO_GRAPHS = "a fresh torch.compile of an nn.Module captured 0 graphs"

NO_FRAMES = "torch.compile with fullgraph=True found no compiled frames."

# What is added to a clean record -> the verdict, and words of the finding.
ROWS: list[tuple[str, Record, Verdict, str]] = [
    ("clean", {}, Verdict.COMPLETED, ""),
    ("unknown probe", {"probes": [UNKNOWN]}, Verdict.COMPLETED, ""),
    (
        "signal",
        {"process": {"ended": "signal", "what": "died by SIGSEGV"}},
        Verdict.NATIVE_CRASH,
        "SIGSEGV",
    ),
    (
        "exit",
        {"process": {"ended": "exit", "what": "exit code 3"}},
        Verdict.NATIVE_CRASH,
        "code 3",
    ),
    (
        "hang",
        {"process": {"ended": "hang", "what": "had not ended"}},
        Verdict.DEADLOCK,
        "not ended",
    ),
    (
        "stuck",
        {"outcomes": [STUCK], **watched(lock_owner="drafter-2")},
        Verdict.DEADLOCK,
        "eval_frame.py:1120 parked; compile_lock is held by drafter-2",
    ),
    ("stuck, no stack", {"outcomes": [STUCK | {"stack": []}]}, Verdict.DEADLOCK, "drafter-1 had"),
    (
        "case raised",
        {"process": {"ended": "raised", "what": "ImportError: no"}},
        Verdict.RAISED,
        "ImportError",
    ),
    (
        "thread raised",
        {"outcomes": [outcome("drafter-0"), died("drafter-1", text="one\ntwo")]},
        Verdict.RAISED,
        "drafter-1: RuntimeError: one",
    ),
    (
        "no message",
        {"outcomes": [died("drafter-1", text="")]},
        Verdict.RAISED,
        "drafter-1: RuntimeError: ",
    ),
    (
        "half-imported module",
        {"outcomes": [died("drafter-1", "AttributeError", "partially initialized module 'x' has")]},
        Verdict.RAISED,
        "drafter-1",
    ),
    (
        "missed entry",
        {
            "outcomes": [
                died("drafter-1", text="x: runtime guards failed even though they passed y")
            ]
        },
        Verdict.SPURIOUS_RECOMPILE,
        "drafter-1",
    ),
    (
        "false message",
        {"outcomes": [died("drafter-1", text=NO_FRAMES)]},
        Verdict.SPURIOUS_RECOMPILE,
        "drafter-1",
    ),
    (
        "recompile limit",
        {"eager": {"drafter-1": "hit recompile_limit"}},
        Verdict.SILENTLY_EAGER,
        "drafter-1 runs uncompiled from here on: hit recompile_limit",
    ),
    (
        "eager flex",
        watched(eager_flex={"drafter-0": 3}),
        Verdict.SILENTLY_EAGER,
        "drafter-0 ran flex_attention uncompiled 3 times",
    ),
    ("counted to 0", watched(eager_flex={"drafter-0": 0}), Verdict.COMPLETED, ""),
    (
        "no graphs",
        {"canaries": {"fresh-compile": NO_GRAPHS}},
        Verdict.SILENTLY_EAGER,
        "captured 0 graphs",
    ),
    ("more", {"compiles": {"drafter-0": 5}}, Verdict.SPURIOUS_RECOMPILE, "5 times, planned 2"),
    ("fewer", {"compiles": {}}, Verdict.SPURIOUS_RECOMPILE, "compiled 0 times, planned 2"),
    (
        "unplanned",
        {"compiles": {"drafter-0": 2, "x": 1}},
        Verdict.SPURIOUS_RECOMPILE,
        "x compiled 1 times, planned 0",
    ),
    ("probe", {"probes": [UNKNOWN, PATCHED]}, Verdict.STICKY_STATE, "module-call is wrapped"),
    (
        "linear",
        {"canaries": {"eager-linear": "NameError"}},
        Verdict.STICKY_STATE,
        "canary eager-linear: NameError",
    ),
    (
        "compile raises",
        {"canaries": {"fresh-compile": "raised X"}},
        Verdict.STICKY_STATE,
        "raised X",
    ),
    (
        "open trace",
        watched(still_in_trace={"tracer": 1}),
        Verdict.STICKY_STATE,
        "tracer ended with 1 open traces",
    ),
    ("number", number(2e-4), Verdict.WRONG_NUMBER, "by 0.0002, allowed 0.0001"),
    ("exactly allowed", number(1e-4), Verdict.COMPLETED, ""),
    ("NaN", number(float("nan")), Verdict.WRONG_NUMBER, "nan"),
    ("infinite", number(float("inf")), Verdict.WRONG_NUMBER, "inf"),
    ("NaN allowed", number(0.0, float("nan")), Verdict.WRONG_NUMBER, "allowed nan"),
    ("anything allowed", number(1.0, float("inf")), Verdict.WRONG_NUMBER, "allowed inf"),
    ("signed", number(-1.0), Verdict.WRONG_NUMBER, "by -1"),
]


@pytest.mark.parametrize(
    ("more", "verdict", "words"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_each_way_to_show_has_its_word(more: Record, verdict: Verdict, words: str) -> None:
    record = clean() | more
    assert judge(record) is verdict
    assert judge(json.loads(json.dumps(record))) is verdict, "a report judges the same"
    found = findings(record)
    assert [f.verdict for f in found[:1]] == ([verdict] if words else [])
    # A spurious recompile, or a half-imported module, that raised has raised as well.
    assert all(f.verdict in (verdict, Verdict.RAISED) for f in found)
    assert all(words in str(finding) for finding in found)


def test_a_true_message_about_frames_is_not_called_false() -> None:
    """The first call of a program that has compiled nothing is told the truth."""
    record = clean(died("drafter-0", text=NO_FRAMES), compiles={}, compiles_planned={})
    assert judge(record) is Verdict.RAISED
    record["outcomes"][0]["steps"] = 1
    assert judge(record) is Verdict.SPURIOUS_RECOMPILE


def test_who_waits_for_the_lock_is_told_from_who_holds_it() -> None:
    stuck = [STUCK, STUCK | {"thread": "drafter-2"}]
    watch = watched(lock_owner="drafter-2", lock_waiters=["drafter-1"])
    first, second = findings(clean(*stuck, **watch))
    assert str(first).endswith("compile_lock is held by drafter-2, and waited for here")
    assert str(second).endswith("compile_lock is held by drafter-2")


def everything_wrong() -> Record:
    """One finding per verdict."""
    return clean(
        STUCK,
        died("drafter-0"),
        process={"ended": "signal", "what": "died by SIGSEGV"},
        compiles={"drafter-0": 3},
        probes=[PATCHED],
        **number(1.0),
        **watched(eager_flex={"drafter-0": 1}),
    )


def test_the_worst_finding_gives_the_verdict_and_the_others_are_kept() -> None:
    words = [finding.verdict for finding in findings(everything_wrong())]
    assert words == list(dict.fromkeys(words)), "one finding each"
    assert set(words) == set(Verdict) - {Verdict.COMPLETED, Verdict.HARNESS_ERROR}
    cures: list[Record] = [
        {"process": clean()["process"]},
        {"outcomes": [died("drafter-0")]},
        {"outcomes": clean()["outcomes"]},
        watched(),
        {"compiles": clean()["compiles"]},
        {"probes": []},
        {"numbers": []},
    ]
    record, seen = everything_wrong(), []
    for cure in cures:
        seen.append(judge(record))
        record |= cure
    assert seen == words
    assert judge(record) is Verdict.COMPLETED


def test_names_of_detectors_are_unique() -> None:
    names = [detector.name for detector in DETECTORS]
    assert len(set(names)) == len(names)


# -- expectations --------------------------------------------------------------------------------

KILLED = Expectation(
    Verdict.RAISED,
    exception="RuntimeError",
    message="using FX",
    frame="torch/_dynamo/eval_frame.py:compile_wrapper",
    state="fx-tracing-flag",
    exposed=("fx-trace",),
    unexposed=("annotation",),
)


def killed() -> Record:
    """A record that meets KILLED."""
    return clean(
        died("drafter-0"),
        outcome("drafter-1"),
        watch=clean()["watch"]
        | {
            "holders": {"drafter-0": {"thread": "drafter-1", "state": "fx-tracing-flag"}},
            "exposures": {"fx-trace": {"drafter-0": 1}, "annotation": {}},
        },
    )


def test_a_control_that_shows_exactly_what_it_should_is_met() -> None:
    assert KILLED.unmet(killed()) == []


def _set(record: Record, path: str, value: Any) -> None:
    *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in keys:
        record = record[key]
    record[last] = value


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (
            "outcomes/0/error/type",
            "builtins.ValueError",
            "raised builtins.ValueError, expected Run",
        ),
        ("outcomes/0/error/message", "CUDA error", "'using FX' is not in 'CUDA error'"),
        ("outcomes/0/error/frames/0/function", "_fn", "1120 _fn, expected torch/_dynamo/eval_fr"),
        (
            "outcomes/0/error/frames/0/file",
            "/v/torch/_dynamo/x.py",
            "raised in /v/torch/_dynamo/x.py",
        ),
        ("outcomes/0/error/frames", [], "raised in no frame, expected"),
        (
            "watch/holders/drafter-0/state",
            "traceback-meta",
            "held state is traceback-meta, expected",
        ),
        ("watch/holders", {}, "held state is unknown, expected fx-tracing-flag"),
        ("watch/holders/drafter-0/thread", "drafter-0", "held state is unknown"),
        ("watch/exposures/fx-trace", {}, "no exposure to another thread's fx-trace"),
        ("watch/exposures/fx-trace", {"MainThread": 9}, "no exposure to another thread's fx-trace"),
        ("watch/exposures/annotation", {"drafter-1": 2}, "2 exposures to another thread's annota"),
        ("script/missed", "'a trace.body' was never reached", "script missed: 'a trace.body' was"),
        ("outcomes/0", outcome("drafter-0"), "verdict is completed, expected raised"),
        ("outcomes/0", outcome("drafter-0"), "no thread raised RuntimeError"),
        ("outcomes/1", died("tracer", "KeyError"), "tracer raised KeyError, expected RuntimeError"),
        ("outcomes/1", died("tracer", function="trace"), "tracer raised in"),
        (
            "process",
            {"ended": "signal", "what": "SIGKILL"},
            "verdict is native crash, expected raised",
        ),
    ],
)
def test_a_control_caught_by_something_else_is_not_caught(path: str, value: Any, line: str) -> None:
    record = copy.deepcopy(killed())
    _set(record, path, value)
    assert line in "\n".join(KILLED.unmet(record))


@pytest.mark.parametrize("only", ["message", "frame", "state"])
def test_message_frame_and_state_count_without_an_exception_class(only: str) -> None:
    expectation = Expectation(Verdict.RAISED, **{only: "something/else.py:entirely"})  # type: ignore[arg-type]
    assert len(expectation.unmet(killed())) == 1


def test_a_guarded_case_must_have_been_in_danger() -> None:
    """A green run without exposure has shown nothing."""
    expectation = Expectation(Verdict.COMPLETED, exposed=("fx-trace",))
    assert expectation.unmet(clean()) == [
        "no exposure to another thread's fx-trace: the danger was not there"
    ]
    record = clean()
    _set(record, "watch/exposures/fx-trace", {"drafter-1": 1})
    assert expectation.unmet(record) == []


@pytest.mark.parametrize("record", [{}, {"process": {"ended": "returned", "what": "returned"}}])
def test_a_case_that_returned_no_record_is_not_a_pass(record: Record) -> None:
    (line,) = Expectation(Verdict.COMPLETED).unmet(record)
    assert "nothing ran" in line


def test_an_unexpected_verdict_is_explained_by_what_was_found() -> None:
    (line,) = Expectation(Verdict.COMPLETED).unmet(clean(probes=[PATCHED]))
    assert line == (
        "verdict is sticky state, expected completed "
        "(sticky state: module-call is wrapped, at rest plain)"
    )


def test_a_frame_is_named_from_the_package_on_and_not_by_the_end_of_a_word() -> None:
    expectation = Expectation(Verdict.RAISED, frame="eval_frame.py:compile_wrapper")
    record = clean(died("drafter-0"))
    assert expectation.unmet(record) == []
    _set(record, "outcomes/0/error/frames/0/file", "/v/torch/my_eval_frame.py")
    assert len(expectation.unmet(record)) == 1


def test_exposures_of_threads_outside_the_crew_do_not_count() -> None:
    record = clean()
    _set(record, "watch/exposures/fx-trace", {"MainThread": 5, "drafter-0": 2, "drafter-1": 1})
    assert exposures(record, "fx-trace") == 3
    assert exposures(record, "no such kind") == 0


@pytest.mark.parametrize("field", ["exposed", "unexposed"])
def test_a_kind_of_exposure_that_nobody_counts_is_refused(field):
    """`unexposed=("fx_trace",)` would hold of every record."""
    with pytest.raises(ValueError, match="unknown exposure 'fx_trace'"):
        Expectation(Verdict.COMPLETED, **{field: ("fx_trace",)})
