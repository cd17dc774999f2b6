"""Records and reports for the tests of what a person sees; no torch, no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.report import files
from harness.report.html import write_index
from harness.report.row import Row, make_row
from harness.verdict import Expectation, Verdict

HOSTILE = "<script>alert('x')</script>\"&|`[x]"
TORCH = "/v/site-packages/torch"


def event(t: float, thread: str, what: str, step: int | None = 0, detail: str = "") -> dict:
    return {"t": t, "thread": thread, "what": what, "step": step, "detail": detail}


def frame(file: str, line: int, function: str, role: str = "passed through") -> dict[str, Any]:
    central = "eval_frame" in file
    return {
        "file": file,
        "line": line,
        "function": function,
        "source": f"{function}()",
        "role": role,
        "central": central,
    }


STACK = [
    frame("/home/user/train.py", 12, "step"),
    *(frame(f"{TORCH}/nn/modules/module.py", line, "_call_impl") for line in (1, 2, 3)),
    frame(f"{TORCH}/_dynamo/eval_frame.py", 1166, "compile_wrapper"),
    *(frame(f"{TORCH}/_functorch/aot.py", line, "trace") for line in range(9)),
]


def outcome(thread: str, state: str = "completed", error: Any = None) -> dict[str, Any]:
    return {
        "thread": thread,
        "state": state,
        "error": error,
        "stack": STACK if state == "unfinished" else [],
        "steps": 3,
        "seconds": 1.0,
    }


def completed() -> dict[str, Any]:
    """Two threads: one compiles, with a trace inside; one warm call beside it."""
    return {
        "torch": "2.13.0",
        "python": "3.11.7",
        "unfix": {"fx-tracing-flag": True},
        "outcomes": [outcome("drafter-0"), outcome("drafter-1")],
        "watch": {"timeline": events(), "timeline_dropped": 7, "holders": {}, "exposures": {}},
        "probes": [{"probe": "fx-patcher", "at_rest": True, "value": "None", "rest": "None"}],
        "process": {"ended": "returned", "what": "returned", "seconds": 2.0},
        "script": {"steps": ["drafter-1 trace.body step=0"], "passed": ["x"], "missed": None},
    }


def events() -> list[dict[str, Any]]:
    one, two = "drafter-0", "drafter-1"
    return [
        event(0.10, two, "step.begin"),
        event(0.11, two, "call.arrive"),
        event(0.11, two, "call.enter"),
        event(0.12, two, "lock.wait"),
        event(0.20, two, "lock.held"),
        event(0.21, two, "lock.wait"),  # taken again by its owner: no span
        event(0.30, two, "trace.begin"),
        event(0.31, two, "trace.body"),
        event(0.35, "race-bystander", "sees fx-tracing-flag", None, "True"),
        event(0.40, one, "step.begin", 3),
        event(0.41, one, "call.arrive", 3),
        event(0.46, one, "call.enter", 3),
        event(0.47, one, "call.exit", 3),
        event(0.48, one, "step.end", 3),
        event(0.50, two, "trace.end"),
        event(0.52, two, "trace.left"),
        event(0.60, two, "lock.released"),
        event(0.61, two, "call.exit"),
        event(0.70, two, "step.end"),
    ]


def raised() -> dict[str, Any]:
    """The same, and the warm call dies of the flag that the other thread holds."""
    record = completed()
    said = "RuntimeError: Detected that you are using FX"
    timeline = [
        e | {"detail": said} if (e["what"], e["thread"]) == ("call.exit", "drafter-0") else e
        for e in events()
        if (e["what"], e["thread"]) != ("step.end", "drafter-0")
    ]
    timeline.insert(12, event(0.465, "drafter-0", "call.settled", 3, said))
    error = {
        "type": "RuntimeError",
        "message": "Detected that you are using FX",
        "frames": [
            frame("/home/user/train.py", 12, "step"),
            frame(f"{TORCH}/_dynamo/eval_frame.py", 1120, "compile_wrapper", "raised here"),
        ],
        "text": "Traceback (most recent call last): ...",
    }
    record["outcomes"][0] = outcome("drafter-0", "raised", error)
    record["watch"] |= {
        "timeline": timeline,
        "holders": {
            "drafter-0": {"thread": "drafter-1", "state": "fx-tracing-flag", "stack": STACK}
        },
        "exposures": {"fx-trace": {"drafter-0": 1}},
    }
    record["cause"] = [{"text": "fx-tracing-flag was written last by drafter-1"}]
    return record


def crashed() -> dict[str, Any]:
    """The process died: nothing but its end is known."""
    process = {
        "ended": "signal",
        "what": "died by SIGSEGV",
        "error": "",
        "dump": "Fatal Python error: Segmentation fault",
        "seconds": 1.0,
    }
    return {"process": process}


def hung() -> dict[str, Any]:
    """A thread is inside a trace at the deadline, and holds the lock."""
    record = completed()
    record["outcomes"][1] = outcome("drafter-1", "unfinished")
    record["watch"]["timeline"] = [e for e in events() if e["t"] < 0.5]
    record["watch"]["lock_owner"] = "drafter-1"
    return record


def write_run(folder: Path, cases: dict[str, tuple[dict[str, Any], Expectation, str]]) -> Path:
    """A report folder as a run writes it; returns the page."""
    rows: list[Row] = []
    for number, (name, (record, expect, kind)) in enumerate(cases.items(), start=1):
        row = make_row(
            name,
            kind,
            record,
            expect,
            test=f"tests/test_it.py:{number}",
            replay=f"python -m pytest 'tests/test_it.py::test_{name}'",
        )
        rows.append(files.write_case(folder, name, record, row))
    files.write_report(folder, rows, {"device": "cpu", "repeat": 1, "time": "2026-01-01"})
    return write_index(folder)


def failing_run(folder: Path) -> Path:
    ok, caught = Expectation(Verdict.COMPLETED), Expectation(Verdict.RAISED)
    return write_run(
        folder,
        {
            "guard[auto]": (completed(), ok, "guarded"),
            "guard[none]": (raised(), ok, "guarded"),
            "fx_flag[no-guard]": (raised(), caught, "control"),
            "crash": (crashed(), ok, "guarded"),
            "hang": (hung(), ok, "guarded"),
            HOSTILE: (raised(), ok, "guarded"),
        },
    )


def passing_run(folder: Path) -> Path:
    ok, caught = Expectation(Verdict.COMPLETED), Expectation(Verdict.RAISED)
    return write_run(
        folder,
        {
            "guard[auto]": (completed(), ok, "guarded"),
            "fx_flag[no-guard]": (raised(), caught, "control"),
        },
    )
