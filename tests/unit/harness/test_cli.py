"""The command line itself: what is wrong with it is one line, whatever terminal shows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEADLINE = 60


def harness(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lunch",), "No such command 'lunch'"),
        (("--lunch",), "No such option"),
        (("explain",), "Missing argument 'folder'"),
        (("run",), "Missing argument 'command'"),
        (("run", "--hang", "soon", "--", "true"), "Invalid value for '--hang'"),
        (("explain", "/no/such/folder"), "no such folder"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(words, said):
    done = harness(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("words", "code"), [((), 2), (("--help",), 0), (("run", "--help"), 0)])
def test_help_is_shown_when_it_is_asked_for_and_when_nothing_is(words, code):
    done = harness(*words)
    assert done.returncode == code
    assert "Usage: harness" in done.stdout + done.stderr and "error" not in done.stderr
