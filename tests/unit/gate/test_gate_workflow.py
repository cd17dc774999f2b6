"""The workflow file keeps its promises: limits, uploads, triggers, one required check.

The two scripts inside it that decide something (the filter and the clean-up) are run here as they
stand in the file. What only GitHub can show (expressions, runners, the merge queue) is not covered.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.aggregate import REQUIRED

ROOT = Path(__file__).parents[3]
PATH = ROOT / ".github" / "workflows" / "gate.yml"
TEXT = PATH.read_text(encoding="utf-8")
# YAML 1.1 reads the bare key `on` as the boolean true.
FLOW: dict[Any, Any] = yaml.safe_load(TEXT)
ON: dict[str, Any] = FLOW[True]
JOBS: dict[str, Any] = FLOW["jobs"]
TIERS = ["cpu", "gpu"]


def step(job: str, name: str) -> dict[str, Any]:
    return next(one for one in JOBS[job]["steps"] if one.get("name") == name)


def names(job: str) -> list[str]:
    return [one.get("name", one.get("uses", "?")) for one in JOBS[job]["steps"]]


def test_triggers_name_their_types() -> None:
    assert set(ON) == {"pull_request", "merge_group", "workflow_dispatch"}
    assert ON["merge_group"]["types"] == ["checks_requested"]
    assert {"synchronize", "ready_for_review", "labeled"} <= set(ON["pull_request"]["types"])


def test_pull_request_target_and_secrets_are_not_used() -> None:
    """Either would hand a fork's code something that it must not have."""
    assert "pull_request_target" not in TEXT
    assert "secrets" not in TEXT
    assert FLOW["permissions"] == {"contents": "read"}
    widened = [name for name, job in JOBS.items() if job.get("permissions")]
    assert widened == []


def test_a_new_push_cancels_only_pull_requests() -> None:
    assert FLOW["concurrency"]["cancel-in-progress"] == (
        "${{ github.event_name == 'pull_request' }}"
    )
    assert "github.event.pull_request.number || github.ref" in FLOW["concurrency"]["group"]


@pytest.mark.parametrize("job", JOBS)
def test_every_step_has_a_limit_and_all_together_fit_the_job(job: str) -> None:
    """So an upload that comes last has its time even when every step before it was cut."""
    limits = [one["timeout-minutes"] for one in JOBS[job]["steps"]]
    assert sum(limits) <= JOBS[job]["timeout-minutes"]


@pytest.mark.parametrize("job", TIERS)
def test_one_test_is_cut_before_its_step(job: str) -> None:
    options = JOBS[job]["env"]["PYTEST_ADDOPTS"]
    one_test = int(re.search(r"faulthandler_timeout=(\d+)", options)[1]) / 60
    assert "faulthandler_exit_on_timeout=true" in options
    assert "-o timeout=0 " in options, "the settings file's limit would end the test before that"
    running = [
        one for one in JOBS[job]["steps"] if re.search(r"nox .*-s \w+ 2", one.get("run", ""))
    ]
    assert running
    assert all(one_test < one["timeout-minutes"] for one in running)


@pytest.mark.parametrize("job", TIERS)
def test_report_is_uploaded_and_summarised_whatever_happened(job: str) -> None:
    upload = JOBS[job]["steps"][-1]
    assert upload["uses"].startswith("actions/upload-artifact@")
    assert upload["if"] == "always()"
    assert step(job, "Summary")["if"] == "always()"


@pytest.mark.parametrize("job", TIERS)
def test_caches_belong_to_the_job(job: str) -> None:
    script = step(job, "Caches and report of this job alone")["run"]
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert re.search(rf"{name}=\$RUNNER_TEMP/\w+", script)
    # The runner context does not exist there; such a line would make an empty path.
    assert not any("runner." in str(value) for value in JOBS[job].get("env", {}).values())


def test_pipes_keep_the_exit_code() -> None:
    """GitHub's unnamed default shell has no pipefail: `nox | tee` would always pass."""
    assert FLOW["defaults"]["run"]["shell"] == "bash"
    assert not any("shell" in one for job in JOBS.values() for one in job["steps"])


def test_actions_are_pinned_by_major_version() -> None:
    used = [one["uses"] for job in JOBS.values() for one in job["steps"] if "uses" in one]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def test_nothing_turns_a_failure_into_a_pass() -> None:
    assert "continue-on-error" not in TEXT
    for job in TIERS:
        assert not any(
            "||" in one["run"] for one in JOBS[job]["steps"] if "nox" in one.get("run", "")
        )


def test_cpu_tier_runs_tests_then_races() -> None:
    text = "\n".join(one.get("run", "") for one in JOBS["cpu"]["steps"])
    assert 0 < text.index("python -m nox -s tests") < text.index("python -m nox -s race")
    assert JOBS["cpu"]["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_gpu_tier_asks_before_it_runs() -> None:
    order = names("gpu")
    wanted = ["Preconditions", "Install", "Canary", "Gate", "Clean up"]
    assert [name for name in order if name in wanted] == wanted
    assert step("gpu", "Clean up")["if"] == "always()"
    assert JOBS["gpu"]["runs-on"] == ["self-hosted", "linux", "gpu"]
    assert JOBS["gpu"]["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_aggregator_needs_every_other_job_and_always_answers() -> None:
    gate = JOBS["gate"]
    assert set(gate["needs"]) == set(JOBS) - {"gate"} == set(REQUIRED)
    assert gate["if"] == "always()"
    decide = step("gate", "Decide")
    assert decide["env"]["NEEDS"] == "${{ toJSON(needs) }}"
    assert decide["run"] == "python3 -P harness/aggregate.py"


@pytest.mark.parametrize(
    ("event", "draft", "fork", "approved", "wanted", "allowed"),
    [
        ("pull_request", "false", "false", "false", "true", "true"),
        ("pull_request", "true", "false", "false", "false", "false"),
        ("pull_request", "true", "true", "true", "false", "false"),
        # Wanted and not allowed: the GPU job is skipped and the gate is red until a label is set.
        ("pull_request", "false", "true", "false", "true", "false"),
        ("pull_request", "false", "true", "true", "true", "true"),
        ("merge_group", "", "false", "false", "true", "true"),
        ("workflow_dispatch", "", "false", "false", "true", "true"),
    ],
)
def test_filter_says_who_gets_a_gpu(
    tmp_path: Path,
    event: str,
    draft: str,
    fork: str,
    approved: str,
    wanted: str,
    allowed: str,
) -> None:
    output = tmp_path / "output"
    told = {"EVENT": event, "DRAFT": draft, "FORK": fork, "APPROVED": approved}
    subprocess.run(
        [
            "bash",
            "-eo",
            "pipefail",
            "-c",
            step("filter", "Is the GPU tier wanted and allowed")["run"],
        ],
        env={"PATH": os.environ["PATH"], "GITHUB_OUTPUT": str(output), **told},
        check=True,
        capture_output=True,
        timeout=20,
    )
    said = dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert (said["gpu_wanted"], said["gpu_allowed"]) == (wanted, allowed)
    assert said["why"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the runner is Linux")
def test_clean_up_ends_marked_processes_and_no_others() -> None:
    """Two processes alike except for the mark; one of the two marked ones ignores TERM."""
    mark = f"gate-test-{os.getpid()}"
    plain = {"PATH": os.environ["PATH"]}
    # Each waits for input that never comes, and says when it is ready.
    wait = ["bash", "-c", "echo ready; read -r line"]
    stubborn = ["bash", "-c", "trap '' TERM; echo ready; read -r line"]
    ours = [start(wait, plain | {"GATE_MARK": mark}), start(stubborn, plain | {"GATE_MARK": mark})]
    theirs = [start(wait, plain), start(wait, plain | {"GATE_MARK": mark + "0"})]
    try:
        script = subprocess.Popen(
            ["bash", "-eo", "pipefail", "-c", step("gpu", "Clean up")["run"]],
            env=plain | {"GATE_MARK": "", "LOOK_FOR": mark},
            stdout=subprocess.PIPE,
            text=True,
        )
        # They are children of this test, which therefore has to reap them.
        codes = [one.wait(timeout=20) for one in ours]
        said, _ = script.communicate(timeout=20)
        assert script.returncode == 0
        assert codes == [-15, -9]
        assert [one.poll() for one in theirs] == [None, None]
        assert "ended 2 left-over processes" in said
        assert step("gpu", "Clean up")["env"]["GATE_MARK"] == ""
    finally:
        for one in ours + theirs:
            one.kill()
            one.communicate()


def start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_the_document_knows_the_exit_codes_and_the_label() -> None:
    document = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    for word in ("`gpu-gate`", "`gate`", "merge queue", "| 3 |", "| 4 |"):
        assert word in document
