"""Prefixes go, the text stays."""

from __future__ import annotations

import json

import pytest

from harness.triage import triage_text
from harness.triage.lines import LINE_CHARACTERS, parse_line


@pytest.mark.parametrize(
    ("raw", "text", "expected"),
    [
        ("[rank3]: KeyError: 'a'", "KeyError: 'a'", {"rank": "3"}),
        ('[1]:   File "x.py", line 2, in f', '  File "x.py", line 2, in f', {"rank": "1"}),
        ("0: Traceback (most recent", "Traceback (most recent", {"rank": "0"}),
        ("[default2]:boom", "boom", {"rank": "2"}),
        ("(RayWorker pid=8001) boom", "boom", {"rank": "RayWorker pid=8001"}),
        ("worker_1  | boom", "boom", {"rank": "worker_1"}),
        ("2026-03-04T08:00:07.001Z stderr F [rank0]: boom", "boom",
         {"rank": "0", "time": "2026-03-04T08:00:07.001Z"}),
        ("2026-11-30 17:10:24,367 drafter-0 INFO step 1", "step 1",
         {"thread": "drafter-0", "level": "INFO", "time": "2026-11-30 17:10:24,367"}),
        ("2026-03-14 09:12:33,123 ERROR [drafter-1] died", "died",
         {"thread": "drafter-1", "level": "ERROR"}),
        ("2026-11-30 12:00:00,123 - trainer - ERROR - boom", "boom", {"level": "ERROR"}),
        ("2026-03-14 09:12:33.1 | ERROR    | a:b:8 - m", "a:b:8 - m", {"level": "ERROR"}),
        ("ERROR:root:boom", "boom", {"level": "ERROR"}),
        ("12:33:11 | WARNING | go", "go", {"level": "WARNING", "time": "12:33:11"}),
        ("W0314 09:12:33.123000 12 torch/_dynamo/x.py:10] [0/8] hit", "hit",
         {"level": "WARNING", "compile_id": "0/8", "source": "torch/_dynamo/x.py:10"}),
        ("V1130 12:00:00.000000 7 torch/x.py:3] [0/1] [__graph_code] g", "g",
         {"artifact": "graph_code", "compile_id": "0/1"}),
        ("[rank1]:[E304 08:10:01.119 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog", "Watchdog",
         {"rank": "1", "level": "ERROR"}),
        ("Mar  4 08:00:07 node7 train[88]: boom", "boom", {"time": "Mar  4 08:00:07"}),
        ('train.log:88:  File "x.py", line 3', '  File "x.py", line 3', {}),
        ("\x1b[31mKeyError: 'a'\x1b[0m", "KeyError: 'a'", {}),
    ],
)  # fmt: skip
def test_a_prefix_is_taken_off_and_understood(raw, text, expected):
    line = parse_line(raw.encode())
    assert line.text == text
    assert {key: getattr(line, key) for key in expected} == expected


@pytest.mark.parametrize(
    "raw",
    [
        "RuntimeError: boom",
        "Epoch: 3",
        "    x: int = 3",
        '  File "x.py", line 3, in f',
        "  | KeyError: 'a'",
        "  + Exception Group Traceback (most recent call last):",
        "KeyError: '[rank0]: not a prefix'",
        "step 12: loss 3",
    ],
)
def test_text_that_only_looks_like_a_prefix_stays(raw):
    line = parse_line(raw.encode())
    assert line.text == raw
    assert line.rank is None and line.thread is None and line.time is None


def test_a_line_of_any_length_is_cut():
    assert len(parse_line(b"x" * 10_000_000).text) == LINE_CHARACTERS


def test_bytes_that_are_no_text_are_kept_as_signs():
    assert "�" in parse_line(b"a \xff\xfe b").text


def test_a_log_of_json_records():
    stack = 'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in f\n    g("x")\n'
    record = {"ts": "2026-01-01T10:00:00", "level": "error", "threadName": "loader",
              "message": "step failed", "exc_info": stack + "KeyError: 'x'"}  # fmt: skip
    calm = {"level": "info", "message": "ValueError: of no importance"}
    text = "".join(json.dumps(row) + "\n" for row in (calm, record, calm))
    (group,) = triage_text(text).failures
    assert (group.event.type, group.threads) == ("KeyError", ["loader"])
    assert group.event.frames[0].source == 'g("x")'
    assert group.first_time == "2026-01-01T10:00:00"


def test_a_json_record_that_is_cut_off():
    text = '{"level": "error", "message": "RuntimeError: boom'
    (group,) = triage_text(text).failures
    assert group.event.message == "boom"
