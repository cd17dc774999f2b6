"""The short grep: it is short, grep takes it, and it finds what triage found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.triage import triage_paths, triage_text
from harness.triage.diagnosis import Diagnosis
from harness.triage.needles import escaped
from harness.triage.show import terminal
from harness.triage.telling import ALTERNATIVES

LOGS = sorted((Path(__file__).parents[2] / "triage" / "open").glob("*.log"))


def found(pattern: str, path: Path) -> set[int]:
    done = subprocess.run(
        ["grep", "-anE", pattern, str(path)], capture_output=True, check=False,
        env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return {int(line.partition(b":")[0]) for line in done.stdout.splitlines()}


def told(diagnosis: Diagnosis) -> list[int]:
    """The lines at which something was found."""
    places = [place for cause in diagnosis.causes for place in cause.evidence]
    return [place.line for place in places if place.line is not None]


@pytest.mark.parametrize("path", LOGS, ids=[path.stem for path in LOGS])
def test_it_finds_what_was_found(path):
    diagnosis = triage_paths([path])
    pattern = diagnosis.grep_found
    assert bool(pattern) == bool(diagnosis.causes)
    if not pattern:
        return
    assert len(pattern) < 400 and "'" not in pattern and "\n" not in pattern
    lines = found(pattern, path)
    first = min(told(diagnosis))
    # An exception's words stand at its end, a whole stack behind the place where it begins.
    assert any(first <= line <= first + 120 for line in lines)


def test_it_finds_little_else():
    calm = "".join(f"step {i} loss {4 / (i + 1):.3f}\n" for i in range(50))
    stack = "Traceback (most recent call last):\n" + '  File "/a.py", line 1, in f\n    g()\n'
    diagnosis = triage_text(calm + stack + "KeyError: 'custom'\n" + calm)
    assert diagnosis.grep_found == "KeyError: .custom."


def test_there_are_few_alternatives():
    errors = "".join(
        f"Traceback (most recent call last):\n{n}Error: no {n * 20}\n" for n in "ABCDEFGHIJ"
    )
    pattern = triage_text(errors).grep_found
    assert pattern.count("|") == ALTERNATIVES - 1


@pytest.mark.parametrize("text", ["a.b*c+d?e", "x[0]", "(a|b){2}^$", "back\\slash", "tick"])
def test_escaped_text_is_itself(text, tmp_path):
    path = tmp_path / "a.log"
    path.write_text(f"axb\n{text}\n")
    assert found(escaped(text), path) == {2}


def test_the_terminal_shows_it_whole_on_one_line():
    text = "ERROR x[0] " + "failed " * 30
    diagnosis = triage_text(text + "\nERROR y[1]\n")
    assert f"'{diagnosis.grep_found}'" in terminal(diagnosis, width=40)
    assert "x\\[0\\]" in diagnosis.grep_found
