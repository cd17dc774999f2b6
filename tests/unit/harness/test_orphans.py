"""However the process that uses the harness goes, server, case and the case's children go too.

Each test starts a process that runs a hanging case, ends that process in one way, and looks
whether anybody survives it. SpecForge#707: a left-over process held 92.6 of 95.3 GiB.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import harness

pytest.importorskip("pytest_timeout")

GONE_WITHIN = 8.0  # seconds, on a loaded machine; it takes about a third of one

# The program under test; each test starts it with a line of its own.
HOST = """
import json, os, subprocess, sys, threading
from pathlib import Path

from harness.isolate import Isolation, IsolationError

HERE = Path(__file__).parent


def announce(**pids):
    part = HERE / "pids.part"
    part.write_text(json.dumps(pids))
    part.rename(HERE / "pids.json")


def hangs():
    child = subprocess.Popen(["sleep", "600"])
    announce(server=os.getppid(), case=os.getpid(), child=child.pid)
    threading.Event().wait()


def hangs_in_c():
    import ctypes

    child = subprocess.Popen(["sleep", "600"])
    announce(server=os.getppid(), case=os.getpid(), child=child.pid)
    ctypes.PyDLL(None).pause()  # and holds the GIL


def run(case=hangs):
    environment = {{"PYTHONPATH": {path!r}}}
    with Isolation(preload={preload!r}, folder=HERE, environment=environment) as isolation:
        isolation.run(case, deadline=300)


def exit_when_told():
    while not (HERE / "exit").exists():
        threading.Event().wait(0.02)
    os._exit(5)
"""

PRELOAD_HANGS = """
import json, os, threading
from pathlib import Path

folder = Path(__file__).parent
(folder / "pids.part").write_text(json.dumps({"server": os.getpid()}))
(folder / "pids.part").rename(folder / "pids.json")
while True:  # an import that takes long
    threading.Event().wait(0.05)
"""

TESTS = """
import pytest
from host import run


@pytest.mark.timeout(1.5, method={method!r})
def test_hangs():
    run()
"""


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    pause, end = threading.Event(), time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, what
        pause.wait(0.02)
    return value


def alive(process: psutil.Process) -> bool:
    try:  # is_running compares the start time: a number that was given again does not count
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _hear_every_signal() -> None:
    """A suite that runs in the background may be deaf to these, and its children with it."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Host:
    """The started program, and everybody whom it told of."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(harness.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=_hear_every_signal,
            text=True,
            start_new_session=True,
        )
        self.others: dict[str, psutil.Process] = {}

    def wait_until_it_hangs(self) -> None:
        file = self.folder / "pids.json"
        until(file.exists, 60, "the case did not start")
        self.others = {
            name: psutil.Process(pid) for name, pid in json.loads(file.read_text()).items()
        }
        assert all(alive(process) for process in self.others.values())

    def assert_nobody_is_left(self) -> None:
        for name, process in self.others.items():
            until(lambda process=process: not alive(process), GONE_WITHIN, f"{name} lives on")

    def output(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def clean_up(self) -> None:
        self.process.kill()  # harmless once it has been waited for
        for process in self.others.values():
            if alive(process):
                process.kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate(timeout=20)


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a host; ``preload_hangs`` stops it while its server still imports."""
    hosts: list[Host] = []

    def start_host(*command: str, preload_hangs: bool = False) -> Host:
        path = os.pathsep.join([str(tmp_path), str(Path(harness.__file__).parents[1])])
        preload = ("json", "preload_hangs") if preload_hangs else ("json",)
        (tmp_path / "preload_hangs.py").write_text(PRELOAD_HANGS)
        (tmp_path / "host.py").write_text(HOST.format(preload=preload, path=path))
        for method in ("signal", "thread"):
            text = TESTS.format(method=method)
            (tmp_path / f"test_with_{method}.py").write_text(text)
        hosts.append(Host(tmp_path, list(command)))
        hosts[-1].wait_until_it_hangs()
        return hosts[-1]

    yield start_host
    for host in hosts:
        host.clean_up()


PLAIN = ("-c", "from host import *; run()")
IN_C = ("-c", "from host import *; run(hangs_in_c)")
EXITS = (
    "-c",
    "from host import *; threading.Thread(target=exit_when_told).start(); run()",
)
during_both = pytest.mark.parametrize("preload_hangs", [False, True], ids=["case", "preload"])


def test_control_a_host_that_lives_keeps_its_case(start: Start) -> None:
    """Otherwise the other tests would pass because nothing ever ran."""
    host = start(*PLAIN)
    assert set(host.others) == {"server", "case", "child"}
    with pytest.raises(subprocess.TimeoutExpired):
        host.process.wait(1.0)
    assert all(alive(process) for process in host.others.values())


@during_both
def test_sigkill_of_the_parent(start: Start, preload_hangs: bool) -> None:
    host = start(*PLAIN, preload_hangs=preload_hangs)
    host.process.kill()
    host.assert_nobody_is_left()


def test_sigkill_of_the_parent_of_a_case_that_hangs_in_c_with_the_gil(start: Start) -> None:
    host = start(*IN_C)
    host.process.kill()
    host.assert_nobody_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_the_parent(start: Start, number: signal.Signals) -> None:
    host = start(*PLAIN)
    host.process.send_signal(number)
    host.assert_nobody_is_left()


@during_both
def test_os_exit_of_the_parent(start: Start, preload_hangs: bool) -> None:
    """What pytest-timeout's thread method and faulthandler do: no clean-up code runs."""
    host = start(*EXITS, preload_hangs=preload_hangs)
    (host.folder / "exit").touch()
    assert host.process.wait(20) == 5
    host.assert_nobody_is_left()


@during_both
def test_ctrl_c(start: Start, preload_hangs: bool) -> None:
    """The terminal sends it to the whole foreground group, the server included."""
    host = start(*PLAIN, preload_hangs=preload_hangs)
    os.killpg(host.process.pid, signal.SIGINT)
    output = host.output()
    assert "KeyboardInterrupt" in output
    assert "forkserver.py" not in output, "one traceback is enough"
    assert host.process.returncode in (-signal.SIGINT, 130)
    host.assert_nobody_is_left()


def test_a_keyboard_interrupt_of_the_parent_alone(start: Start) -> None:
    host = start(*PLAIN)
    host.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in host.output()
    host.assert_nobody_is_left()


@during_both
@pytest.mark.parametrize("method", ["thread", "signal"])
def test_pytest_timeout(start: Start, method: str, preload_hangs: bool) -> None:
    host = start(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_with_{method}.py"),
        preload_hangs=preload_hangs,
    )
    output = host.output()
    assert "Timeout" in output, output
    assert host.process.returncode == 1
    host.assert_nobody_is_left()


def test_sigkill_of_the_server(start: Start) -> None:
    """The kernel ends the case; its parent, which still lives, ends what the case has started."""
    host = start(*PLAIN)
    host.others["server"].kill()
    assert "the fork server died during hangs" in host.output()
    host.assert_nobody_is_left()


def test_sigkill_of_the_server_of_a_parent_that_cannot_help(start: Start) -> None:
    host = start(*PLAIN)
    host.process.send_signal(signal.SIGSTOP)
    host.others["server"].kill()
    until(lambda: not alive(host.others["case"]), GONE_WITHIN, "the case lives on")
