"""A failing race case leaves a crash folder, a passing one none; `harness explain` reads it."""

from __future__ import annotations

import json
import sys

import pytest

CASES = """
import os

def outcome(name, state="completed", error=None):
    return {"thread": name, "state": state, "error": error, "stack": []}

def completed():
    return {"outcomes": [outcome("drafter-0")]}

def raises():
    frame = {"file": "/x/site-packages/torch/_dynamo/eval_frame.py", "line": 989,
             "function": "compile_wrapper", "source": "", "role": "raised here", "central": True}
    error = {"type": "RuntimeError", "message": "Detected", "frames": [frame], "causes": []}
    holder = {"thread": "drafter-0", "state": "fx-tracing-flag", "stack": [frame]}
    return {"torch": "2.11.0", "python": "3.12.1",
            "outcomes": [outcome("drafter-0"), outcome("drafter-1", "raised", error)],
            "watch": {"holders": {"drafter-1": holder}}}

def crashes():
    os.kill(os.getpid(), 11)
"""
CONFTEST = "import harness.plugin\nharness.plugin.PRELOAD = ()\n"  # no torch: it is not the subject
TEST = """
import pytest, cases
from harness import Expectation, Verdict
pytestmark = pytest.mark.race
OK = Expectation(Verdict.COMPLETED)

@pytest.mark.parametrize("name", ["completed", "raises", "crashes"])
def test_a(race_trial, name):
    race_trial(getattr(cases, name), expect=OK)
"""


@pytest.fixture
def result(pytester: pytest.Pytester) -> pytest.RunResult:
    pytester.makepyfile(cases=CASES, test_it=TEST)
    pytester.makeconftest(CONFTEST)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--race-report=out", timeout=120)


def explain(pytester: pytest.Pytester, folder: str) -> pytest.RunResult:
    return pytester.run(sys.executable, "-m", "harness", "explain", folder, timeout=60)


def test_each_failing_case_leaves_a_folder_and_says_how_to_read_it(pytester, result):
    result.assert_outcomes(passed=1, failed=2)
    folders = sorted(path.name for path in (pytester.path / "out" / "crashes").iterdir())
    assert folders == ["test_a[crashes]", "test_a[raises]"]
    result.stdout.fnmatch_lines(["harness explain 'out/crashes/test_a?raises?'"])
    told = explain(pytester, "out/crashes/test_a[raises]")
    assert told.ret == 1
    told.stdout.fnmatch_lines(
        [
            "drafter-1 died of RuntimeError at *eval_frame.py:989*held by drafter-0*",
            "torch 2.11.0, Python 3.12.1*",
        ]
    )


def test_the_whole_report_folder_can_be_explained(pytester, result):
    told = explain(pytester, "out")
    assert told.ret == 1
    told.stdout.fnmatch_lines(["*died by SIGSEGV*", "drafter-1 died of RuntimeError*"])


def test_the_next_run_takes_the_folders_away(pytester, result):
    pytester.makepyfile(cases=CASES.replace("os.kill(os.getpid(), 11)", "return completed()"))
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--race-report=out", timeout=120)
    folders = [path.name for path in (pytester.path / "out" / "crashes").iterdir()]
    assert folders == ["test_a[raises]"]
    data = json.loads((pytester.path / "out/crashes/test_a[raises]/crash.json").read_text())
    assert data["origin"] == "case"
