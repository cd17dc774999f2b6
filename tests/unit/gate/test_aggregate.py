"""The one required status: what passes, and each of the ways in which it must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import aggregate
from harness.aggregate import decide, main

DRAFT = "draft, which cannot be merged"


def needs(**results: str | None) -> dict[str, Any]:
    """All three jobs succeeded, except as told; None leaves the job out."""
    jobs = {"filter": "success", "cpu": "success", "gpu": "success"} | results
    told = {name: {"result": result, "outputs": {}} for name, result in jobs.items() if result}
    told.get("filter", {})["outputs"] = {"why": DRAFT}
    return told


def test_all_jobs_succeeded() -> None:
    assert decide(needs(), gpu_wanted=True)[0] is True


@pytest.mark.parametrize("job", ["filter", "cpu", "gpu"])
@pytest.mark.parametrize("result", ["failure", "cancelled", "timed_out", "", "new word", None])
@pytest.mark.parametrize("gpu_wanted", [True, False])
def test_anything_but_success_fails(job: str, result: str | None, gpu_wanted: bool) -> None:
    passes, lines = decide(needs(**{job: result}), gpu_wanted)
    assert passes is False
    assert sum(line.startswith("FAIL") and f" {job}:" in line for line in lines) == 1


@pytest.mark.parametrize("job", ["filter", "cpu"])
@pytest.mark.parametrize("gpu_wanted", [True, False])
def test_a_skipped_job_fails(job: str, gpu_wanted: bool) -> None:
    assert decide(needs(**{job: "skipped"}), gpu_wanted)[0] is False


def test_gpu_may_be_skipped_only_when_the_filter_says_so_in_writing() -> None:
    passes, lines = decide(needs(gpu="skipped"), gpu_wanted=False)
    assert passes is True
    assert f"ok    gpu: skipped, no GPU tier is wanted ({DRAFT})" in lines
    passes, lines = decide(needs(gpu="skipped"), gpu_wanted=True)
    assert passes is False
    assert f"FAIL  gpu: skipped, but the GPU tier is wanted ({DRAFT})" in lines


def test_gpu_skipped_because_cpu_failed_is_no_excuse() -> None:
    assert decide(needs(cpu="failure", gpu="skipped"), gpu_wanted=False)[0] is False


def test_a_filter_that_did_not_succeed_cannot_excuse_the_gpu() -> None:
    passes, lines = decide(needs(filter="cancelled", gpu="skipped"), gpu_wanted=False)
    assert passes is False
    assert sum(line.startswith("FAIL") for line in lines) == 2


def test_no_jobs_at_all_fail() -> None:
    assert decide({}, gpu_wanted=False)[0] is False


def test_a_job_added_later_is_required_without_being_named() -> None:
    assert decide(needs(docs="success"), gpu_wanted=True)[0] is True
    assert decide(needs(docs="skipped"), gpu_wanted=True)[0] is False


@pytest.mark.parametrize(("written", "code"), [("false", 0), ("true", 1), ("", 1), ("False", 1)])
def test_an_unclear_filter_means_wanted(written: str, code: int) -> None:
    environ = {"NEEDS": json.dumps(needs(gpu="skipped")), "GPU_WANTED": written}
    assert main(environ) == code


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_unreadable_needs_are_bad_input(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main({"NEEDS": text, "GPU_WANTED": "false"}) == 2
    assert capsys.readouterr().out.startswith("NEEDS: ")


def test_the_summary_says_what_the_log_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    environ = {"NEEDS": json.dumps(needs(cpu="failure")), "GITHUB_STEP_SUMMARY": str(summary)}
    assert main(environ) == 1
    printed = capsys.readouterr().out
    assert summary.read_text() == f"before\n```\n{printed}```\n"
    assert printed.endswith("gate: failed\n")


def test_runs_from_a_bare_checkout() -> None:
    """`-S` hides all installed packages: the standard library must be enough."""
    done = subprocess.run(
        [sys.executable, "-S", "-P", aggregate.__file__],
        env={"NEEDS": json.dumps(needs()), "GPU_WANTED": "true"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
