"""`harness run` leaves a program as it is: streams, arguments, signals, exit code, imports.

No program here imports torch; what it sees of torch is in test_run_on_torch.py.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness import run as module

DEADLINE = 60
HARNESS = [sys.executable, "-m", "harness", "run"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(tmp_path) -> Callable[..., Path]:
    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def run(tmp_path) -> Run:
    def start(*words: object, options: tuple[str, ...] = (), **more):
        command = [*HARNESS, *options, "--", *map(str, words)]
        more = {"cwd": tmp_path, "capture_output": True, "text": True} | more
        return subprocess.run(command, timeout=DEADLINE, check=False, **more)

    return start


def test_streams_arguments_and_exit_code_are_the_programs(run, program):
    path = program(
        """
        import sys
        print("got", sys.stdin.read(), sys.argv[1:])
        print("told", file=sys.stderr)
        sys.exit(7)
        """
    )
    done = run(sys.executable, path, "--report", "x y", "", input="some input")
    assert done.returncode == 7
    assert done.stdout == "got some input ['--report', 'x y', '']\n"
    assert done.stderr.startswith("told\n")


def test_a_module_and_a_console_script_are_watched_too(run, program):
    died = (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='worker')\nt.start()\n"
    )
    program(died, "package/__main__.py")
    script = program(f"#!{sys.executable}\n{died}", "tool")
    script.chmod(0o755)
    for words in ((sys.executable, "-m", "package"), (script,)):
        done = run(*words)
        assert done.returncode == 1
        assert "harness: worker died of ZeroDivisionError" in done.stderr
        assert "Exception in thread worker" in done.stderr  # Python's own words stay


def test_a_dead_thread_makes_a_folder_that_explain_reads(run, program, tmp_path):
    path = program(
        """
        import threading
        def work():
            raise LookupError("lost")
        thread = threading.Thread(target=work, name="drafter-1")
        thread.start()
        thread.join()
        """
    )
    done = run(sys.executable, path, "--token", "very-secret-1", options=("--report", "out"))
    assert done.returncode == 1
    assert "see 'harness explain out'" in done.stderr
    data = json.loads((tmp_path / "out" / "crash.json").read_text())
    (failed,) = data["failures"]
    assert failed["thread"] == "drafter-1" and failed["died"]
    assert failed["error"]["frames"][-1]["function"] == "work"
    assert data["argv"][-2:] == ["--token", "***"]
    whole = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "very-secret" not in whole
    explained = subprocess.run(
        [sys.executable, "-m", "harness", "explain", "out"],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": DEADLINE},
        check=False,
    )
    assert explained.returncode == 1
    assert "drafter-1 died of LookupError" in explained.stdout


def test_the_programs_own_exit_code_wins_over_ours(run, program):
    path = program(
        """
        import sys, threading
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        sys.exit(5)
        """
    )
    assert run(sys.executable, path).returncode == 5


@pytest.mark.parametrize("hook", ["", "sys.excepthook = lambda *_: None"])
def test_an_uncaught_exception_of_the_main_thread_is_seen_with_any_hook(run, program, hook):
    path = program(f"import sys\n{hook}\nraise OSError('end')\n")
    done = run(sys.executable, path)
    assert done.returncode == 1
    assert "harness: MainThread died of OSError" in done.stderr


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)", "pass"])
def test_a_program_that_ends_well_leaves_nothing(run, program, tmp_path, leave):
    done = run(sys.executable, program(f"import os, sys\n{leave}\n"))
    assert done.returncode == 0
    assert "torch._dynamo was not imported" in done.stderr
    assert not (tmp_path / "harness-report").exists()


def test_an_earlier_failure_is_taken_away(run, program, tmp_path):
    assert run(sys.executable, program("1 / 0")).returncode == 1
    assert run("pyhton", "x.py").returncode == 2
    assert (tmp_path / "harness-report" / "crash.json").exists(), "what did not run takes nothing"
    assert run(sys.executable, program("pass")).returncode == 0
    assert not (tmp_path / "harness-report").exists()


def test_the_users_sitecustomize_runs_and_stays_under_its_name(run, program, tmp_path):
    # The command itself is a Python program and loads it as well: it keeps quiet there.
    text = "import os\nif 'HARNESS_RUN' in os.environ:\n    print('mine')\nMARK = 1\n"
    program(text, "own/sitecustomize.py")
    path = program("import sitecustomize\nprint(sitecustomize.MARK)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "own")}
    assert run(sys.executable, path, env=environment).stdout == "mine\n1\n"


def test_an_error_in_the_users_sitecustomize_is_told_by_python(run, program, tmp_path):
    program("raise ValueError('theirs')\n", "own/sitecustomize.py")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "own")}
    done = run(sys.executable, program("print('on')"), env=environment)
    assert done.stdout == "on\n" and "ValueError: theirs" in done.stderr


def test_a_program_with_a_package_called_harness_keeps_it(run, program):
    program("NAME = 'theirs'\n", "harness/__init__.py")
    program("VALUE = 3\n", "harness/probes.py")
    program("KIND = 'theirs too'\n", "recorder.py")
    path = program(
        """
        import sys, threading
        import harness, recorder
        from harness import probes
        print(harness.NAME, probes.VALUE, recorder.KIND)
        print([entry for entry in sys.path if "inject" in entry])
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        print(harness.NAME)
        """
    )
    # -P: the harness's own command must not take the program's package for itself
    command = [sys.executable, "-P", "-m", "harness", "run", "--", sys.executable, str(path)]
    done = subprocess.run(
        command,
        **{"cwd": path.parent, "capture_output": True, "text": True, "timeout": DEADLINE},
        check=False,
    )
    assert done.stdout == "theirs 3 theirs too\n[]\ntheirs\n", done.stderr
    assert done.returncode == 1 and "died of ZeroDivisionError" in done.stderr


def test_a_child_that_has_nothing_to_do_with_torch_is_not_reported(run, program, tmp_path):
    child = program("1 / 0", "child.py")
    path = program(
        f"""
        import subprocess, sys
        print(subprocess.run([sys.executable, {str(child)!r}]).returncode)
        """
    )
    done = run(sys.executable, path)
    assert done.returncode == 0 and done.stdout == "1\n"
    assert not (tmp_path / "harness-report").exists()


def test_a_forked_child_does_not_write_over_its_parent(run, program, tmp_path):
    path = program(
        """
        import multiprocessing, threading
        def work():
            raise LookupError("of the parent")
        thread = threading.Thread(target=work, name="parents")
        thread.start()
        thread.join()
        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=exit, args=(3,))
            child.start()
            child.join()
            print(child.exitcode)
        """
    )
    done = run(sys.executable, path)
    assert done.stdout == "3\n" and done.returncode == 1
    data = json.loads((tmp_path / "harness-report" / "crash.json").read_text())
    assert [failure["thread"] for failure in data["failures"]] == ["parents"]


def test_an_exception_can_still_be_pickled_after_it_was_seen(run, program):
    path = program(
        """
        import pickle, sys, threading
        kept = []
        def hook(arguments, old=threading.excepthook):
            old(arguments)
            kept.append(arguments.exc_value)
        threading.excepthook = hook
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        print(repr(pickle.loads(pickle.dumps(kept[0]))))
        """
    )
    assert run(sys.executable, path).stdout == "ZeroDivisionError('division by zero')\n"


# -- bad input and what cannot be watched ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        ((), ("no-such-program",), "no-such-program: command not found"),
        ((), ("./plain.py",), "try 'harness run -- python ./plain.py'"),
        (("--unfix", "nothing"), ("true",), "there is no unfix 'nothing'"),
        (("--perturb", "1", "--no-hooks"), ("true",), "leave --no-hooks out"),
        (("--hang", "-1"), ("true",), "--hang must be a number of seconds"),
        (("--report", "plain.py"), ("true",), "is not a folder"),
        (("--report", "."), ("true",), "holds other files; name a new folder"),
        (("--report", "plain.py/out"), ("true",), "cannot be written; name another folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, program, options, words, said):
    program("pass", "plain.py")
    done = run(*words, options=options)
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [("true",), (sys.executable, "-I", "-c", "pass")])
def test_a_program_that_nothing_watched_is_not_called_clean(run, words):
    done = run(*words)
    assert done.returncode == 2
    assert "nothing was watched" in done.stderr


def test_without_a_temporary_folder_it_says_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(module.RunError, match="no temporary folder can be made"):
        module.run(module.Request(["true"], report=tmp_path / "out"))


def test_without_standard_error_the_exit_code_is_still_the_programs(program, tmp_path):
    path = program("import sys; sys.exit(7)")
    command = shlex.join([*HARNESS, "--", sys.executable, str(path)])
    done = subprocess.run(
        f"{command} 2>&-", shell=True, cwd=tmp_path, timeout=DEADLINE, check=False
    )
    assert done.returncode == 7


def test_a_full_disk_does_not_hide_the_programs_own_error(run, program):
    # From its first line on, nothing that the program's process writes to a file arrives.
    path = program(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        raise LookupError("the real one")
        """
    )
    done = run(sys.executable, path)
    assert done.returncode == 1
    assert "LookupError: the real one" in done.stderr
    assert "harness: the report cannot be written" in done.stderr


def test_what_was_found_is_told_by_the_exit_code_on_a_full_disk(run, program):
    path = program(
        """
        import resource, threading
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        threading.Thread(target=lambda: 1 / 0, name="worker").start()
        """
    )
    done = run(sys.executable, path)
    assert done.returncode == 1
    assert "harness: something was found, but" in done.stderr


# -- signals -------------------------------------------------------------------------------------

WAITS = """
import signal, sys, threading
def on_signal(number, _frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(9)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handed_on_once_and_the_programs_answer_counts(program, tmp_path, number):
    command = [*HARNESS, "--", sys.executable, str(program(WAITS))]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=DEADLINE)
    assert out == f"got {number.name}\n"
    assert process.returncode == 9


def test_a_program_killed_by_a_signal_is_reported_as_a_shell_does(run, program):
    path = program("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run(sys.executable, path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "died by SIGKILL" in done.stderr


def test_a_signal_without_a_name_kills_as_any_other(run):
    done = run("sh", "-c", "kill -40 $$")
    assert done.returncode == 128 + 40
    assert "sh died by signal 40" in done.stderr


def test_the_program_gets_default_signals_and_no_blocked_ones(run, program):
    path = program(
        """
        import signal
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """
    )
    assert run(sys.executable, path).stdout == "set()\n"
