"""The canary passes with an honest pytest and turns red for each way of hiding a failure.

All of it runs in child processes; no test here waits for longer than its child's own limit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from harness import canary
from harness.canary import EXIT_CANARY, PYTEST, run_child

FAILING, ENDED, NAMED = "failing test is reported", "hanging test is ended", "hanging line is named"


def broken(checks: list[canary.Check]) -> list[str]:
    return [one.name for one in checks if not one.ok]


def test_an_honest_pytest_passes_and_the_hang_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Limits from PYTEST_ADDOPTS, which the workflow sets for the real tests, must not win."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-o faulthandler_timeout=900")
    path = tmp_path / "canary.json"
    assert canary.main(path, hang_seconds=1, deadline_seconds=30) == 0
    written = json.loads(path.read_text())
    assert [one["name"] for one in written["checks"]] == [FAILING, ENDED, NAMED]
    assert f"test_canary.py:{canary.HANG_LINE} in test_hangs" in capsys.readouterr().out


def test_a_wrapper_that_always_exits_0_is_caught(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'pytest', *sys.argv[1:]])\n"
        "sys.exit(0)\n"
    )
    command = (sys.executable, str(wrapper))
    limits = {"hang_seconds": 1, "deadline_seconds": 30}
    checks = canary.run(pytest_command=command, **limits)
    assert broken(checks) == [FAILING, ENDED], "the dump is there; the exit codes are the lie"


def test_main_returns_the_canary_code_when_nothing_is_run() -> None:
    """A command that does nothing and is content with it: the plainest gate that cannot fail."""
    content = (sys.executable, "-c", "")
    assert canary.main(pytest_command=content, deadline_seconds=30) == EXIT_CANARY == 4


def test_deselected_tests_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_passes")
    assert FAILING in broken(canary.run(hang_seconds=1, deadline_seconds=30))


def test_failures_turned_into_xfail_are_caught(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(
        "import pytest\n\n\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.add_marker(pytest.mark.xfail(strict=False))\n"
    )
    start = "import sys, pytest; sys.path.insert(0, sys.argv.pop(1)); sys.exit(pytest.main())"
    command = (sys.executable, "-c", start, str(tmp_path), "-p", "quiet")
    checks = canary.run(pytest_command=command, hang_seconds=1, deadline_seconds=30)
    assert broken(checks) == [FAILING]


def test_without_the_watchdog_the_outer_deadline_ends_the_hang() -> None:
    command = (*PYTEST, "-p", "no:faulthandler")
    checks = canary.run(pytest_command=command, hang_seconds=1, deadline_seconds=4)
    assert {ENDED, NAMED} <= set(broken(checks))
    assert "killed at the outer deadline" in checks[1].found


def test_the_deadline_kills_the_whole_group(tmp_path: Path) -> None:
    """A grandchild that waits for ever keeps the pipe open; only its death lets this return."""
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import threading; l = threading.Lock(); l.acquire(); l.acquire()'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    ended = run_child((sys.executable, "-c", script), tmp_path, deadline=2.0)
    assert ended.code is None
    assert ended.seconds < 7
    # The pipe closes a moment before the kernel is done with the process.
    try:
        grandchild = psutil.Process(int(ended.output))
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([grandchild], timeout=10)
    assert not alive or alive[0].status() == psutil.STATUS_ZOMBIE


def test_the_settings_file_of_the_project_is_used(tmp_path: Path) -> None:
    """Negative control for `config`: settings that hide the failing test must be seen."""
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\naddopts = --collect-only\n")
    checks = canary.run(config=settings, hang_seconds=1, deadline_seconds=30)
    assert broken(checks) == [FAILING, ENDED, NAMED]


def test_a_missing_settings_file_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        canary._command(["--config", "absent.toml"])
    assert stopped.value.code == 2
    assert "absent.toml: no such file" in capsys.readouterr().err
