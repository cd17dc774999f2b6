"""A failing race case says in pytest's own output who did it."""

from __future__ import annotations

import pytest

CASE = """
def killed():
    holder = {"thread": "drafter-1", "state": "fx-tracing-flag", "stack": [], "step": 4,
              "since": 1.0, "until": None, "victim_since": 1.5, "failed_at": 2.0,
              "write": {"point": "trace.body", "t": 1.1, "stack": [], "thread": "drafter-1"}}
    error = {"type": "RuntimeError", "message": "Detected", "frames": []}
    dead = {"thread": "drafter-0", "state": "raised", "error": error, "stack": []}
    return {"outcomes": [dead], "watch": {"holders": {"drafter-0": holder}}}
"""
TEST = """
import pytest, cases
from harness import Expectation, Verdict

@pytest.mark.race
def test_mine(race_trial):
    race_trial(cases.killed, expect=Expectation(Verdict.COMPLETED))
"""


def test_the_cause_stands_beside_the_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(cases=CASE)
    pytester.makeconftest("import harness.plugin\nharness.plugin.PRELOAD = ()\n")
    pytester.makepyfile(test_mine=TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=100)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*race case: cause*",
            "drafter-0 died of RuntimeError: Detected; fx-tracing-flag was written last by "
            "drafter-1 in its step 4, at trace.body; both were inside for 500.0 ms, *",
        ]
    )
