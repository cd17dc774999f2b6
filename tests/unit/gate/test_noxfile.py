"""The sessions' own bad input: one line, exit code 2, and no environment is made for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def nox(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the noxfile, from another folder."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(ROOT / "noxfile.py", project)
    command = [sys.executable, "-m", "nox", "-f", str(project / "noxfile.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeat", "0"], "--repeat must be at least 1, not 0"),
        (["--repeat", "many"], "argument --repeat: invalid int value: 'many'"),
        (["--torch", "2.8.0"], "torch 2.8.0 is not supported: use one from 2.9 to 2.15"),
        (["--torch=newest"], "--torch takes a release such as 2.11.0, not 'newest'"),
    ],
)
@pytest.mark.parametrize("session", ["race", "gate"])
def test_bad_input_is_one_line_and_makes_nothing(tmp_path, session, arguments, said):
    done = nox(tmp_path, "-s", session, "--", *arguments)
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: nox -s {session} --: {said}"
    assert not (tmp_path / "project" / ".nox").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--runs", "0"], "--runs must be at least 1, not 0"),
        (["--torch", "2.11.0"], "unrecognized arguments: --torch 2.11.0"),
    ],
)
def test_bad_input_of_the_matrix_is_one_line_and_makes_nothing(tmp_path, arguments, said):
    done = nox(tmp_path, "-s", "matrix(2.11.0)", "--", *arguments)
    assert (done.returncode, done.stderr.strip()) == (2, f"error: nox -s matrix --: {said}")
    assert not (tmp_path / "project" / ".nox").exists()


def test_the_sessions_that_the_documents_name_exist(tmp_path):
    listed = nox(tmp_path, "-l").stdout
    for session in ("race", "tests", "gate", "browser", "lint"):
        assert f" {session} ->" in listed


def test_constraints_pin_one_torch_without_a_local_label_and_no_cuda():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if line.startswith(("nvidia", "cuda", "triton"))]
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in line and "+" not in line for line in pinned)
