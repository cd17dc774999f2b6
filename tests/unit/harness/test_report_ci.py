"""What GitHub is told: workflow commands by its escaping rules, Markdown without surprises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_records import HOSTILE

from harness.report import ci
from harness.report.row import Row

GOOD = Row("good", "guarded", 3, 3, "completed", "completed", seconds=2.0, torch="2.13.0")
BAD = replace(
    GOOD,
    case="guard[a,b]",
    verdict="raised",
    unmet=("100% wrong", "and more"),
    test="tests/test_it.py:42",
    replay="python -m pytest x",
)
ROOT = Path("/home/runner/work/it/it")
ACTIONS = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": "/home/runner/work/it"}


def commands(*rows, environment=ACTIONS):
    return ci.workflow_commands(rows, root=ROOT, environment=environment)


def test_a_command_escapes_what_would_end_a_field_or_the_message():
    assert commands(GOOD, BAD) == [
        "::error file=it/tests/test_it.py,line=42,"
        "title=guard[a%2Cb]%3A raised%2C expected completed"
        "::100%25 wrong%0Aand more%0Aagain: python -m pytest x"
    ]


@pytest.mark.parametrize("text", ["a\r\nb", "a:b,c%0A", "::error::x"])
def test_no_text_can_leave_its_place(text):
    (line,) = commands(replace(BAD, case=text, unmet=(text,)))
    assert "\n" not in line and "\r" not in line
    _, fields, message = line.split("::", 2)
    assert len(fields.removeprefix("error ").split(",")) == 3
    restored = message.replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    assert restored.startswith(text)


def test_a_known_finding_warns_and_repeats_are_one_annotation():
    known = replace(BAD, case="known", known="somebody, a report")
    lines = commands(known, BAD, BAD)
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning"]


def test_a_path_outside_the_workspace_stays_whole():
    (line,) = commands(BAD, environment={"GITHUB_ACTIONS": "true"})
    assert line.startswith("::error file=/home/runner/work/it/it/tests/test_it.py,line=42,")


def test_github_shows_ten_and_the_last_says_how_many_more():
    lines = commands(*(replace(BAD, case=str(number)) for number in range(14)))
    assert len(lines) == 10
    assert lines[-1] == "::error title=compile races::5 more cases: see the log"


@pytest.mark.parametrize("environment", [{}, {"GITHUB_ACTIONS": "false"}, {"CI": "true"}])
def test_elsewhere_nothing_is_said(environment):
    assert commands(BAD, environment=environment) == []
    assert ci.write_summary([BAD], environment) is None


def test_the_summary_is_appended(tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert ci.write_summary([GOOD, BAD], {"GITHUB_STEP_SUMMARY": str(path)}) == path
    text = path.read_text()
    assert text.startswith("before\n### Compile races\n* guarded: 1 of 2 completed\n")
    assert text.index("guard\\[a,b\\]") < text.index("<code>good</code>"), "failures first"


def test_markdown_of_a_hostile_name_is_one_row_of_text():
    text = ci.markdown([replace(BAD, case=HOSTILE + "\n# head", holder="@team *x*")])
    assert "<script" not in text and "\n# head" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("| <code>&lt;script")]
    assert line.replace("\\|", "").count("|") == 8, "seven cells"
    assert "\\@team \\*x\\*" in line


def test_a_summary_stays_below_the_limit_and_says_what_is_missing():
    rows = [replace(BAD, case=f"{number} " + "x" * 500) for number in range(2000)]
    text = ci.markdown(rows)
    assert len(text.encode()) <= ci.MOST_SUMMARY_BYTES
    assert "more cases are left out here" in text and text.endswith("</details>\n\n")


def test_properties_name_verdict_kind_torch_replay_and_seconds():
    found = dict(ci.properties(BAD))
    assert found["race_verdict"] == "raised" and found["race_kind"] == "guarded"
    assert found["race_torch"] == "2.13.0" and found["race_seconds"] == "2.000"
    assert found["race_replay"] == "python -m pytest x"
