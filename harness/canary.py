"""Proves that the gate can fail: one test must be seen to fail, one to hang and be ended.

Covers: the pytest of this environment, with its plugins, its PYTEST_ADDOPTS and (with `config`)
the project's own settings, reports a failed assertion by name and with exit code 1; a test that
waits for ever in C with the GIL released is ended by the C watchdog with a stack that names the
waiting line. A test that passes stands beside the failing one, so "everything fails" is no proof.

Does not cover: hangs that hold the GIL or sit in the driver, hangs outside a test (collection,
session fixtures), and the conftest files of the project: the canary lives in a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.preconditions import Check, passed, report

EXIT_CANARY = 4

HANG_SECONDS = 5.0  # the inner limit: pytest's C watchdog ends the hanging test
DEADLINE_SECONDS = 90.0  # the outer limit: covers start-up on a cold disk, then kills the group

PYTEST = (sys.executable, "-m", "pytest")

FILE = "test_canary.py"
# The second acquire waits in C for a lock that its own thread holds: nothing can ever wake it.
SOURCE = """\
import threading


def test_passes():
    assert True


def test_fails():
    assert 1 == 2, "canary"


def test_hangs():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the hanging line
"""
HANG_LINE = next(n for n, line in enumerate(SOURCE.splitlines(), 1) if "the hanging line" in line)


@dataclass(frozen=True)
class Ended:
    """How a child ended. `code` is None when the outer deadline had to kill it."""

    code: int | None
    seconds: float
    output: str

    def told(self) -> str:
        how = "killed at the outer deadline" if self.code is None else f"exit code {self.code}"
        return f"{how} after {self.seconds:.1f} s"


def run_child(command: Sequence[str], folder: Path, deadline: float) -> Ended:
    """Runs one child in its own process group; at the deadline [s] the whole group is killed."""
    begin = time.monotonic()
    child = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None = None
    try:
        output, _ = child.communicate(timeout=deadline)
        code = child.returncode
    except subprocess.TimeoutExpired:
        # The leader is not reaped yet, so the group id cannot have passed to somebody else.
        os.killpg(child.pid, signal.SIGKILL)
        output = _rest(child)
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return Ended(code, time.monotonic() - begin, output)


def _rest(child: subprocess.Popen[str]) -> str:
    """What a killed child had written."""
    try:
        return child.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        # Something left the group with setsid and keeps the pipe open; it must not keep us too.
        return ""


def run(
    *,
    pytest_command: Sequence[str] = PYTEST,
    config: Path | None = None,
    hang_seconds: float = HANG_SECONDS,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> list[Check]:
    """Runs both canaries and says what was seen. Needs pytest >= 9 for the exit on a hang."""
    with tempfile.TemporaryDirectory(prefix="gate-canary-") as name:
        folder = Path(name)
        (folder / FILE).write_text(SOURCE, encoding="utf-8")
        own = folder / "pytest.ini"
        own.write_text("[pytest]\n", encoding="utf-8")
        settings = config.resolve() if config else own
        base = [*pytest_command, "-p", "no:cacheprovider", "-c", str(settings)]
        passes, fails, hangs = (
            f"{folder / FILE}::{test}" for test in ("test_passes", "test_fails", "test_hangs")
        )
        junit = folder / "junit.xml"
        failing = run_child([*base, f"--junitxml={junit}", passes, fails], folder, deadline_seconds)
        # Given on the command line, these win over the settings file and PYTEST_ADDOPTS.
        limits = [f"faulthandler_timeout={hang_seconds}", "faulthandler_exit_on_timeout=true"]
        options = [part for limit in limits for part in ("-o", limit)]
        hanging = run_child([*base, *options, hangs], folder, deadline_seconds)
        results = _results(junit)
    return [_failing(failing, results), _ended(hanging, deadline_seconds), _stack(hanging)]


def _results(junit: Path) -> dict[str, str]:
    """Test name -> passed, failed or another word of pytest's, as the report file says."""
    try:
        cases = list(ET.parse(junit).iter("testcase"))
    except (OSError, ET.ParseError):
        return {}
    words = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return {
        case.get("name", "?"): next((words[e.tag] for e in case if e.tag in words), "passed")
        for case in cases
    }


def _failing(ended: Ended, results: dict[str, str]) -> Check:
    wanted = {"test_passes": "passed", "test_fails": "failed"}
    told = ", ".join(f"{test} {word}" for test, word in results.items()) or "no report file"
    return Check(
        "failing test is reported",
        ended.code == 1 and results == wanted,
        f"{ended.told()}, {told}",
        "exit code 1, test_passes passed, test_fails failed",
        "look for a wrapper, plugin or PYTEST_ADDOPTS that hides failures or deselects tests",
    )


def _ended(ended: Ended, deadline: float) -> Check:
    return Check(
        "hanging test is ended",
        ended.code not in (None, 0),
        ended.told(),
        f"its own watchdog ends it with a non-zero exit code within {deadline:g} s",
        "use pytest >= 9 with the faulthandler plugin on (no `-p no:faulthandler`)",
    )


def _stack(ended: Ended) -> Check:
    # The first frame of ours in the dump is the innermost one, that is, the line that waits.
    frame = re.search(rf'{re.escape(FILE)}", line (\d+) in test_hangs', ended.output)
    last = (ended.output.strip().splitlines() or ["no output"])[-1]
    return Check(
        "hanging line is named",
        frame is not None and int(frame[1]) == HANG_LINE,
        f"{FILE}:{frame[1]} in test_hangs" if frame else f"no frame of test_hangs; last: {last}",
        f"a stack dump with {FILE}:{HANG_LINE} in test_hangs",
        "let the standard error of the tests through; the dump is written there",
    )


def main(
    json_path: Path | str | None = None,
    *,
    pytest_command: Sequence[str] = PYTEST,
    config: Path | None = None,
    hang_seconds: float = HANG_SECONDS,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> int:
    """0 when both canaries were seen, else EXIT_CANARY: a gate that cannot fail is no gate."""
    checks = run(
        pytest_command=pytest_command,
        config=config,
        hang_seconds=hang_seconds,
        deadline_seconds=deadline_seconds,
    )
    report(checks, json_path)
    return 0 if passed(checks) else EXIT_CANARY


def _command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.canary")
    parser.add_argument("--config", type=Path, help="the project's pytest settings file")
    parser.add_argument("--json", help="write the result here as well")
    given = parser.parse_args(arguments)
    if given.config is not None and not given.config.is_file():
        parser.error(f"--config {given.config}: no such file; name the project's settings file")
    return main(given.json, config=given.config)


if __name__ == "__main__":
    raise SystemExit(_command())
