"""The table and the files of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.report import files, table
from harness.report.html import write_index
from harness.report.row import Row, make_row
from harness.verdict import Expectation, Verdict

GOOD = Row("guard[auto-together]", "guarded", 3, 3, "completed", "completed", seconds=2.0)
BAD = replace(GOOD, case="fx_flag[no-guard]", kind="control", unmet=("no thread raised",))
RECORD = {
    "outcomes": [
        {
            "thread": "drafter-0",
            "state": "raised",
            "stack": [],
            "error": {
                "type": "RuntimeError",
                "message": "Detected",
                "frames": [
                    {
                        "file": "/v/site-packages/torch/_dynamo/eval_frame.py",
                        "line": 1120,
                        "function": "compile_wrapper",
                    }
                ],
            },
        },
        {"thread": "drafter-1", "state": "completed", "stack": [], "error": None},
    ],
    "watch": {
        "holders": {"drafter-0": {"thread": "drafter-1", "state": "fx-tracing-flag"}},
        "exposures": {"fx-trace": {"drafter-0": 2, "MainThread": 5}},
    },
    "process": {"ended": "returned", "what": "returned", "seconds": 1.5},
}


def test_a_row_names_frame_holder_and_the_crews_own_danger():
    row = make_row("a", "control", RECORD, Expectation(Verdict.RAISED))
    assert row.frame == "torch/_dynamo/eval_frame.py:1120 compile_wrapper"
    assert row.holder == "drafter-1 (fx-tracing-flag)"
    assert row.exposures["fx-trace"] == 2, "the main thread's own calls are not the crew's danger"
    assert (row.completed, row.threads, row.met) == (1, 2, True)


def test_a_row_survives_json():
    assert Row.from_dict(json.loads(json.dumps(BAD.as_dict()))) == BAD


def test_brackets_in_names_are_not_taken_for_markup():
    assert "fx_flag[no-guard]" in table.render([BAD], width=160, color=False)


def test_repeats_of_a_case_are_one_line_with_a_rate():
    text = table.render([GOOD, GOOD, replace(GOOD, unmet=("x",))], width=160, color=False)
    assert text.count("guard[auto-together]") == 1
    assert "2/3" in text


def test_summary_counts_by_kind_and_says_why():
    assert table.summary([GOOD, BAD]) == [
        "guarded: 1 of 1 completed",
        "control: 0 of 1 caught",
        "fx_flag[no-guard]: no thread raised",
    ]


@pytest.mark.parametrize("columns", ["80", "110", "200"])
def test_a_report_can_be_shown_again_and_keeps_its_exit_code(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for rows, code in (([GOOD], 0), ([GOOD, BAD], 1)):
        files.write_report(tmp_path, rows, {"device": "cpu"})
        shown = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert shown.exit_code == code
        assert "guard[auto-together]" in shown.output


@pytest.mark.parametrize("text", [None, "not json", "{}", '{"cases": [{"case": 1}]}'])
def test_what_is_not_a_report_is_one_line_and_exit_code_2(tmp_path, text):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ") and shown.output.count("\n") == 1


def test_clear_leaves_nothing_of_an_earlier_run(tmp_path):
    files.write_case(tmp_path, "odd/name [x]", RECORD, GOOD)
    files.write_report(tmp_path, [GOOD], {})
    write_index(tmp_path)
    names = {"odd_name_[x].json", "odd_name_[x].trace.json"}
    assert {p.name for p in (tmp_path / "cases").iterdir()} == names
    files.clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cases/mine.json", "crashes/mine.txt", "report.json"])
def test_a_folder_with_files_of_others_where_ours_would_go_is_foreign(tmp_path, name):
    assert not files.is_foreign(tmp_path / "none") and not files.is_foreign(tmp_path)
    (tmp_path / "junit.xml").write_text("beside a report: it stays")
    assert not files.is_foreign(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("[]")
    assert files.is_foreign(tmp_path)


def test_an_earlier_report_is_not_foreign_whole_or_broken_off(tmp_path):
    files.write_case(tmp_path / "off", "a", RECORD, GOOD)
    files.write_report(tmp_path / "whole", [GOOD], {})
    assert not files.is_foreign(tmp_path / "off") and not files.is_foreign(tmp_path / "whole")


def test_two_tests_of_one_name_do_not_share_a_file(tmp_path):
    rows = [files.write_case(tmp_path, "same", RECORD, GOOD) for _ in range(2)]
    assert [row.file for row in rows] == ["same.json", "same-2.json"]


def test_no_secret_reaches_the_files_of_a_case(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-1")
    record = json.loads(json.dumps(RECORD).replace("Detected", "refused: very-secret-1"))
    row = make_row("a", "guarded", record, Expectation(Verdict.COMPLETED))
    row = files.write_case(tmp_path, "a", record, row)
    files.write_report(tmp_path, [row], {})
    whole = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "refused: ***" in whole and "very-secret" not in whole
    assert not row.met and row.file == "a.json"
