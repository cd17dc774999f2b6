"""`harness explain`: the right names, the right place, the right exit code, in a screenful."""

from __future__ import annotations

import json

import pytest
from failures import content, failure
from typer.testing import CliRunner

from harness import crash, explain
from harness.cli import app

TRAINING = {
    "reason": "drafter-1 died (packet 3): RuntimeError: Detected that you are using FX",
    "time": "2026-01-01 00:00:00 +0000",
    "torch": "2.11.0",
    "python": "3.12.1",
    "environment": {},
    "state": {"fx-patcher": "installed", "is-compiling": "False", "stance": "default"},
    "step": 4,
    "workers": [
        {
            "worker": "drafter-0",
            "alive": True,
            "activity": "compile",
            "packet": 2,
            "traceback": "",
        },
        {
            "worker": "drafter-1",
            "alive": False,
            "activity": "queue",
            "packet": 3,
            "traceback": (
                "Traceback (most recent call last):\n"
                '  File "/app/train.py", line 3, in body\n    step()\n'
                '  File "/x/site-packages/torch/_dynamo/eval_frame.py", line 989, in '
                "compile_wrapper\n    raise RuntimeError(\n"
                "RuntimeError: Detected that you are using FX to symbolically trace a "
                "dynamo-optimized function. This is not supported at the moment.\n"
            ),
        },
    ],
}
STACKS = """\
thread drafter-1
  File "/app/worker.py", line 5, in run
    stop()

thread drafter-0
  File "/app/worker.py", line 4, in run
    step()
  File "/x/site-packages/torch/fx/_symbolic_trace.py", line 850, in trace
    self.root()
  File "/x/site-packages/torch/_ops.py", line 12, in call
    return fn()

"""


@pytest.fixture
def folder(tmp_path):
    told = content(versions={"torch": "2.11.0", "python": "3.12.1"})
    crash.write_folder(tmp_path, told, timeline={})
    return tmp_path


def run(*arguments: str, width: int = 100) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": str(width)})
    return done.exit_code, done.output


def test_victim_culprit_overlap_and_version_are_said(folder):
    code, text = run(str(folder))
    assert code == 1
    lines = text.splitlines()
    assert "drafter-1 died of RuntimeError at" in lines[0]
    assert "fx-tracing-flag held by drafter-0" in lines[0]
    assert "torch 2.11.0" in lines[1]
    assert "250.0 ms: drafter-0 in its trace from 1.000 to 2.000 s" in text
    assert "compile_guard('auto')" in text
    assert len(lines) <= 40


@pytest.mark.parametrize(("width", "beside"), [(90, False), (140, True)])
def test_two_stacks_stand_beside_each_other_where_there_is_room(folder, width, beside):
    _, text = run(str(folder), width=width)
    titles = [line for line in text.splitlines() if line.startswith("victim drafter-1")]
    assert ("holder drafter-0" in titles[0]) is beside
    assert "holder drafter-0" in text
    assert max(map(len, text.splitlines()[3:])) <= width


def test_json_says_the_same_to_a_machine(folder):
    code, text = run(str(folder), "--json")
    assert code == 1
    data = json.loads(text)
    (report,) = data["reports"]
    (victim,) = report["victims"]
    assert data["failed"] and victim["culprit"] == "drafter-0"
    assert victim["overlap"] == {
        **{"victim": [1.5, 1.75], "culprit": [1.0, 2.0], "kind": "trace", "seconds": 0.25}
    }
    assert victim["raised_at"].endswith("failure")
    assert report["versions"]["torch"] == "2.11.0" and report["next"]


def test_without_a_culprit_none_is_made_up(tmp_path):
    crash.write_folder(tmp_path, content(failures=[failure(culprit=False)]), timeline={})
    code, text = run(str(tmp_path))
    assert code == 1
    assert "held by" not in text and "no culprit is known" in text


def test_stuck_state_alone_is_a_failure(tmp_path):
    row = {"probe": "is-compiling", "where": "w", "rest": "False", "value": "True"}
    crash.write_folder(tmp_path, content(failures=[], stuck=[row]), timeline={})
    code, text = run(str(tmp_path))
    assert code == 1 and "everybody stopped, and is-compiling is True" in text


def test_a_hang_shows_who_was_inside_of_what(tmp_path):
    frame = {"file": "/app/model.py", "line": 7, "function": "backend", "source": "wait()"}
    span = {"thread": "drafter-0", "start": 2.0, "end": None}
    thread = {"thread": "drafter-0", "outcome": "still running", "stack": [frame]}
    thread["inside"] = [span | {"kind": "call"}, span | {"kind": "compile lock", "start": 2.5}]
    process = {"ended": "no progress for 9 s: drafter-0", "hung": ["drafter-0"]}
    told = content(failures=[], threads=[thread], process=process)
    crash.write_folder(tmp_path, told, timeline={})
    code, text = run(str(tmp_path))
    assert code == 1 and text.startswith("no progress for 9 s: drafter-0")
    assert "drafter-0: in its call, compile lock since 2.000 s, at app/model.py:7 backend" in text


def test_a_folder_without_a_failure_is_0(tmp_path):
    crash.write_folder(tmp_path, content(failures=[]), timeline={})
    assert run(str(tmp_path))[0] == 0


def test_a_training_runs_report_is_read_by_its_format(tmp_path):
    inside = tmp_path / "crash"
    inside.mkdir()
    (inside / "report.json").write_text(json.dumps(TRAINING))
    (inside / "stacks.txt").write_text(STACKS)
    for place in (tmp_path, inside):
        code, text = run(str(place))
        assert code == 1
        assert "drafter-1 died of RuntimeError at torch/_dynamo/eval_frame.py:989" in text
        assert "fx-tracing-flag, held by drafter-0 (probably" in text
        assert "torch 2.11.0" in text


def test_a_training_run_that_stalled_names_nobody_as_holder(tmp_path):
    stalled = {**TRAINING, "reason": "drafter-0 stalled for 9 s", "workers": []}
    (tmp_path / "report.json").write_text(json.dumps(stalled))
    code, text = run(str(tmp_path))
    assert code == 1
    assert "drafter-0 stalled for 9 s" in text and "held by" not in text


def test_several_processes_are_all_told(folder):
    told = content(failures=[{**failure(), "thread": "other-rank"}])
    crash.write_folder(folder / "process-12", told, timeline={})
    code, text = run(str(folder))
    assert code == 1
    assert "drafter-1 died" in text and "other-rank died" in text


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (None, "", "holds no crash.json"),
        ("crash.json", "{", "is damaged"),
        ("crash.json", "[]", "is not a crash report"),
        ("crash.json", '{"schema": 999, "failures": []}', "has schema 999"),
        ("crash.json", '{"cases": []}', "is not a crash report of this harness"),
        ("report.json", '{"cases": []}', "holds no crash.json"),
        ("crash.json", '{"schema": 1, "failures": [{}]}', "is damaged"),
        ("crash.json", '{"schema": 1, "failures": [], "process": null}', "is damaged"),
        ("report.json", '{"workers": [{"traceback": "x"}], "reason": "r"}', "is damaged"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, file, text, said):
    if file is not None:
        (tmp_path / file).write_text(text)
    code, output = run(str(tmp_path))
    assert code == 2
    assert said in output and len(output.strip().splitlines()) == 1


def test_a_folder_that_is_not_there_is_exit_code_2(tmp_path):
    code, output = run(str(tmp_path / "none"))
    assert code == 2 and "no such folder" in output


def test_a_file_instead_of_its_folder_is_exit_code_2(folder):
    code, output = run(str(folder / "crash.json"))
    assert code == 2 and "is a file; name the folder that it is in" in output


def test_markup_in_a_message_is_shown_as_it_is(tmp_path):
    crash.write_folder(
        tmp_path, content(failures=[failure("bad [red]index[/red] [/x]")]), timeline={}
    )
    assert "bad [red]index[/red] [/x]" in run(str(tmp_path), width=200)[1]


def test_every_advice_belongs_to_a_state_that_can_be_blamed():
    from harness.inject.agent import STUCK
    from harness.inject.blame import RULES

    known = {rule.state for rule in RULES} | set(STUCK)
    assert set(explain.ADVICE) <= known
    assert {rule.state for rule in RULES} <= set(explain.ADVICE)
