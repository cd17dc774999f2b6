"""A TORCH_TRACE folder, read directly and through tlparse, joined with the log."""

from __future__ import annotations

import json
import os

import pytest

from harness.triage import Unreadable, triage_paths

HEAD = "V1130 17:39:{second:09.6f} 32096 torch/_dynamo/{file}:{line}] "
STACK = [
    {"line": 1002, "name": "_bootstrap", "filename": 0, "loc": "self._bootstrap_inner()"},
    {"line": 9, "name": "work", "filename": 1}, {"line": 2, "name": "f", "filename": 1},
]  # fmt: skip


def record(second, data, file="convert_frame.py", line=303):
    return HEAD.format(second=second, file=file, line=line) + json.dumps(data)


def trace_text():
    ids = {"frame_id": 0, "frame_compile_id": 0, "attempt": 0}
    failed = ids | {"frame_id": 1}
    metrics = {"compile_id": "0/0", "co_name": "f", "co_filename": "/opt/a.py",
               "co_firstlineno": 2, "fail_type": None, "fail_reason": None}  # fmt: skip
    broken = metrics | {
        "compile_id": "1/0", "co_name": "g", "fail_type": "BackendCompilerFailed",
        "fail_reason": "backend='bad' raised:\nValueError: backend bug",
    }  # fmt: skip
    return "\n".join(
        [
            record(10, {"str": ["/usr/lib/python3.11/threading.py", 0]}),
            record(10, {"str": ["/opt/a.py", 1]}),
            record(10, {"artifact": {"name": "torch_version"}, "has_payload": "x"}),
            '\t{\n\t"pytorch_version": "2.13.0+cpu",\n\t}',
            record(10, {"dynamo_start": {"stack": STACK}} | ids),
            "\tdynamo_start in a payload is no record",
            record(14, {"compilation_metrics": metrics} | ids, "utils.py", 2009),
            record(20, {"dynamo_start": {"stack": STACK}} | failed),
            record(21, {"compilation_metrics": broken} | failed, "utils.py", 2009),
            'V1130 17:39:22.000000 1 torch/x.py:1] {"dynamo_start": {"cut o',
        ]
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "dedicated_log_torch_trace_x.log").write_text(trace_text())
    return tmp_path / "trace"


def test_a_trace_alone_tells_version_compiles_and_failure(folder):
    diagnosis = triage_paths([], trace=folder)
    assert (diagnosis.torch.version, diagnosis.torch.how) == ("2.13.0", "stated")
    ids = {one["id"]: one for one in diagnosis.trace["compiles"]}
    assert ids["0/0"]["function"] == "/opt/a.py:2 f" and ids["0/0"]["in_thread"]
    assert ids["0/0"]["start"] == "1130 17:39:10.000000"
    (group,) = diagnosis.failures
    assert group.event.type == "BackendCompilerFailed" and group.count == 1
    assert diagnosis.trace["joined"] == [{"failure": 0, "compile": "1/0", "beside": []}]


def test_a_failure_of_the_log_is_joined_with_the_compile_beside_it(folder, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "2026-11-30 17:39:12,500 INFO step 3\nException in thread drafter-1:\n"
        'Traceback (most recent call last):\n  File "/opt/other.py", line 4, in run\n    net(x)\n'
        "RuntimeError: boom\n2026-11-30 17:39:30,000 INFO step 4\n"
    )
    diagnosis = triage_paths([log], trace=folder)
    assert [g.event.type for g in diagnosis.failures] == ["RuntimeError", "BackendCompilerFailed"]
    joined = {row["failure"]: row for row in diagnosis.trace["joined"]}
    assert joined[0] == {"failure": 0, "compile": None, "beside": ["0/0 /opt/a.py:2 f"]}


def test_a_failure_that_log_and_trace_tell_counts_once(folder, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/opt/a.py", line 9, in work\n    f(x)\n'
        "torch._dynamo.exc.BackendCompilerFailed: backend='bad' raised:\nValueError: backend bug\n"
    )
    diagnosis = triage_paths([log], trace=folder)
    (group,) = diagnosis.failures
    assert group.count == 1 and diagnosis.trace["joined"][0]["compile"] == "1/0"


def test_tlparse_is_used_where_it_is_installed(folder, tmp_path, monkeypatch):
    """A stand-in with tlparse's options and the form of its raw.jsonl."""
    tools = tmp_path / "bin"
    tools.mkdir()
    rows = [
        {"string_table": ["/usr/lib/python3.11/threading.py", "/opt/a.py"]},
        {"dynamo_start": {"stack": STACK}, "frame_id": 5, "frame_compile_id": 1,
         "timestamp": "2026-11-30T17:39:58.017000Z", "thread": 1},
    ]  # fmt: skip
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool = tools / "tlparse"
    tool.write_text(f'#!/bin/sh\n/bin/mkdir -p "$3"\n/bin/cat {tmp_path}/rows > "$3/raw.jsonl"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/nowhere")
    trace = triage_paths([], trace=folder).trace
    assert trace["reader"] == "tlparse"
    (one,) = trace["compiles"]
    assert (one["id"], one["function"]) == ("5/1", "/opt/a.py:2 f")
    assert one["start"] == "1130 17:39:58.017000"


def test_a_tlparse_that_fails_is_replaced(folder, tmp_path, monkeypatch):
    tool = tmp_path / "tlparse"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    trace = triage_paths([], trace=folder).trace
    assert trace["reader"] == "direct" and len(trace["compiles"]) == 2


def test_a_folder_without_a_trace_is_one_line(tmp_path):
    with pytest.raises(Unreadable, match="TORCH_TRACE="):
        triage_paths([], trace=tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-01-01 step 1\n", "no trace is in it"),
        (record(10, {"dynamo_start": 5}), "is no trace of torch"),
        (record(10, {"str": "x"}), "is no trace of torch"),
    ],
)
def test_a_folder_with_something_else_is_one_line(tmp_path, monkeypatch, text, said):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(Unreadable, match=said) as caught:
        triage_paths([], trace=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_each_rank_numbers_its_own_compiles(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "trace").mkdir()
    for number in "01":
        text = trace_text().replace("/opt/a.py", f"/opt/of_{number}.py")
        text = text.replace("BackendCompilerFailed", f"Failed{number}")
        (tmp_path / "trace" / f"dedicated_log_torch_trace_rank_{number}_x.log").write_text(text)
    log = tmp_path / "train.log"
    prefix = f"[rank{rank}]:E1130 17:39:20.500000 9 torch/_dynamo/x.py:3] [1/0] "
    log.write_text(
        "".join(
            f"{prefix}{line}\n"
            for line in (
                "Traceback (most recent call last):", '  File "/opt/b.py", line 9, in work',
                "    f(x)", "RuntimeError: boom",
            )
        )
    )  # fmt: skip
    diagnosis = triage_paths([log], trace=tmp_path / "trace")
    (index,) = [i for i, g in enumerate(diagnosis.failures) if g.event.type == "RuntimeError"]
    (row,) = [row for row in diagnosis.trace["joined"] if row["failure"] == index]
    assert row["compile"] == "1/0" and not row["beside"]
    own = diagnosis.trace["compiles"]
    assert {one["rank"] for one in own} == {"0", "1"}


def test_a_tlparse_that_hangs_is_given_up(folder, tmp_path, monkeypatch):
    tool = tmp_path / "tlparse"
    tool.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("harness.triage.structured.TLPARSE_SECONDS", 0.2)
    assert triage_paths([], trace=folder).trace["reader"] == "direct"
