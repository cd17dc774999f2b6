"""The sessions' own bad input: one line, exit code 2, and no environment is made for it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


def nox(
    tmp_path: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the noxfile, from another folder."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(ROOT / "noxfile.py", project)
    command = [sys.executable, "-m", "nox", "-f", str(project / "noxfile.py"), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | (env or {}),
    )


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("GATE_GPUS", "all"), ("GATE_GPUS", "-1"), ("GATE_GPUS", "1.5"), ("GATE_MIN_FREE_GIB", "16G")],
)
def test_a_wrong_number_in_the_gates_environment_is_one_line_and_makes_nothing(
    tmp_path, name, value
):
    done = nox(tmp_path, "-s", "gate", env={name: value})
    said = f"error: {name} must be a number of 0 or more, not {value!r}"
    assert (done.returncode, done.stderr.strip()) == (2, said)
    assert not (tmp_path / "project" / ".nox").exists()


def test_an_unknown_benchmark_is_one_line_and_makes_nothing(tmp_path):
    done = nox(tmp_path, "-s", "bench", "--", "no_such")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nox -s bench --: no benchmark 'no_such': use")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "project" / ".nox").exists()


def test_ctrl_c_lets_what_runs_finish_its_last_words(monkeypatch, tmp_path, capfd):
    """Longer than the quarter of a second that subprocess.run gives before it kills."""
    spec = importlib.util.spec_from_file_location("a_noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "argv", ["nox"])
    spec.loader.exec_module(module)
    session = SimpleNamespace(log=lambda line: None, bin=Path(sys.executable).parent)
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    child = (
        "import signal, time\n"
        "def end(*_):\n"
        "    until = time.monotonic() + 0.75\n"
        "    while time.monotonic() < until:\n"
        "        pass\n"
        "    print('last words', flush=True)\n"
        "    raise SystemExit(1)\n"
        "signal.signal(signal.SIGINT, end)\n"
        f"open({str(ready)!r}, 'w').write(str(__import__('os').getpid()))\n"
        "signal.pause()\n"
    )

    def press() -> None:
        pid = int(ready.read_text())  # opens when the child is ready
        os.kill(pid, signal.SIGINT)  # a terminal sends it to both
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    # A job that a shell has put into the background ignores Ctrl-C, and its children do.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            module._python(session, "-c", child)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().out == "last words\n"
    presser.join(10)


def test_the_sessions_that_the_documents_name_exist(tmp_path):
    listed = nox(tmp_path, "-l").stdout
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        name
        for path in documents
        for name in re.findall(r"\bnox (?:-R )?-s \"?([a-z]+)", path.read_text())
    }
    assert {"race", "tests", "gate", "browser"} <= named
    for session in named:
        assert re.search(rf"^[*-] {session}[( ]", listed, re.M), f"no session {session}"


def test_constraints_pin_one_torch_without_a_local_label_and_no_cuda():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if line.startswith(("nvidia", "cuda", "triton"))]
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in line and "+" not in line for line in pinned)
