"""`harness run` on programs that compile in threads: who failed, who held the state, what is stuck.

Each program is a process with a deadline; none of them knows of the harness.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 120
DRAFTERS = Path(__file__).with_name("foreign") / "drafters.py"
UNFIX = ("--unfix", "fx-tracing-flag")


@pytest.fixture
def run(tmp_path) -> Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]:
    """Runs a program (a path, or its text); returns how it ended and the crash.json, or {}."""

    def start(program: Path | str, *arguments: str, options: tuple[str, ...] = ()):
        if isinstance(program, str):
            path = tmp_path / "program.py"
            path.write_text(textwrap.dedent(program))
        else:
            path = program
        command = [sys.executable, "-m", "harness", "run", *options, "--", sys.executable, path]
        done = subprocess.run(
            [*map(str, command), *arguments],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": DEADLINE},
            check=False,
        )
        report = tmp_path / "harness-report" / "crash.json"
        return done, json.loads(report.read_text()) if report.exists() else {}

    return start


# A trace that is held open while another thread calls compiled code: the danger by an event.
HELD = """
import threading
import torch
from torch.fx import symbolic_trace

compiled = torch.compile(lambda x: x + 1, backend="eager")
compiled(torch.ones(2))
inside, done = threading.Event(), threading.Event()

def traced(x):
    inside.set()
    done.wait(30)
    return x * 2

def culprit():
    symbolic_trace(traced)

def victim():
    inside.wait(30)
    try:
        compiled(torch.ones(2))
    except RuntimeError as error:
        if CAUGHT:
            print("caught", type(error).__name__)
        else:
            raise
    finally:
        done.set()

threads = [threading.Thread(target=f, name=f.__name__) for f in (culprit, victim)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("caught", [True, False])
def test_victim_culprit_both_stacks_and_overlap_are_known(run, caught):
    """pytorch#126024, whether or not the program keeps the exception for itself."""
    done, data = run(f"CAUGHT = {caught}\n" + HELD, options=UNFIX)
    assert done.returncode == 1, done.stderr
    (failed,) = data["failures"]
    assert failed["thread"] == "victim" and failed["died"] is not caught
    raised = failed["error"]["frames"][-1]
    assert raised["file"].endswith("torch/_dynamo/eval_frame.py")
    assert raised["function"] == "compile_wrapper"
    way = [frame["function"] for frame in failed["stack"] + failed["error"]["frames"]]
    assert way.count("victim") == 1 and way.count("run") == 1, "the whole way, and no part twice"
    culprit = failed["culprit"]
    assert (culprit["thread"], culprit["state"]) == ("culprit", "fx-tracing-flag")
    assert culprit["how"] == "inside"
    functions = [frame["function"] for frame in culprit["stack"]]
    assert functions.index("culprit") < functions.index("trace") < functions.index("traced")
    assert culprit["span"]["start"] < failed["t"] < culprit["span"]["end"]
    assert failed["probes"]["fx-tracing-flag"] == "True"
    assert data["stuck"] == []
    assert data["versions"]["torch"] and data["unfix"] == {"fx-tracing-flag": True}
    assert not any("/harness/" in frame["file"] for frame in failed["stack"] + culprit["stack"])


def test_the_same_program_on_this_torch_as_it_is_is_clean_or_names_the_culprit(run):
    """Where torch is vulnerable (to 2.13: a bare trace is not masked) it must be found again."""
    import torch.fx._symbolic_trace as st

    done, data = run("CAUGHT = True\n" + HELD)
    if hasattr(st, "_is_fx_tracing_tls"):
        assert done.returncode == 0 and "clean: 2 compiled calls in 2 threads" in done.stderr
    else:
        assert data["failures"][0]["culprit"]["thread"] == "culprit"


def test_without_a_second_thread_inside_nobody_is_blamed(run):
    """The negative control: an exception of the user's own, beside another thread's trace."""
    program = HELD.replace(
        "compiled(torch.ones(2))\n    except", "raise RuntimeError()\n    except"
    )
    done, data = run("CAUGHT = False\n" + program)
    assert done.returncode == 1
    (failed,) = data["failures"]
    assert failed["thread"] == "victim" and failed["culprit"] is None
    assert [span["thread"] for span in failed["others"]] == ["culprit"]


def test_an_exception_that_a_future_keeps_is_found(run):
    program = """
    from concurrent.futures import ThreadPoolExecutor
    """ + textwrap.indent(HELD.split("threads = [")[0], "    ")
    program += """
    CAUGHT = False
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        futures = [pool.submit(culprit), pool.submit(victim)]
    print([future.exception() is None for future in futures])
    """
    done, data = run(program, options=UNFIX)
    assert done.stdout == "[True, False]\n", done.stderr
    assert done.returncode == 1
    assert data["failures"][0]["thread"].startswith("pool_")
    assert data["failures"][0]["culprit"]["state"] == "fx-tracing-flag"


def test_state_that_stays_after_everybody_has_stopped_is_found(run):
    """Two overlapping traces, left in the wrong order, leave nn.Module patched (pytorch#112775)."""
    program = """
    import threading
    import torch
    import torch._dynamo
    from torch.fx import symbolic_trace

    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first(x):
        first_in.set()
        second_in.wait(30)
        return x + 1

    def second(x):
        second_in.set()
        first_out.wait(30)
        return x + 1

    def outer():
        try:
            symbolic_trace(first)
        except AssertionError:
            pass
        finally:
            first_out.set()

    def inner():
        first_in.wait(30)
        try:
            symbolic_trace(second)
        except AssertionError:
            pass

    threads = [threading.Thread(target=f, name=f.__name__) for f in (outer, inner)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    """
    done, data = run(program)
    assert done.returncode == 1, done.stderr
    assert "everybody stopped" in done.stderr
    assert "module-call" in {row["probe"] for row in data["stuck"]}


def test_a_program_may_change_settings_and_patch_modules_itself(run):
    """The negative control of the audit: nothing of this is torch's own left-over."""
    program = """
    import threading
    import torch
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 99
    torch.compiler.set_stance("force_eager")
    old = torch.nn.Module.__call__
    def mine(self, *args, **kwargs):
        return old(self, *args, **kwargs)
    torch.nn.Module.__call__ = mine
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")
    threads = [threading.Thread(target=compiled, args=(torch.ones(1, 2),)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    """
    done, data = run(program)
    assert done.returncode == 0, done.stderr
    assert data == {} and "clean:" in done.stderr


@pytest.mark.parametrize("hooks", ["--hooks", "--no-hooks"])
def test_state_that_a_running_thread_still_holds_is_not_called_stuck(run, hooks):
    """A daemon thread is inside a trace when the program ends: that is no left-over."""
    program = """
    import threading
    import torch._dynamo
    from torch.fx import symbolic_trace

    inside = threading.Event()

    def traced(x):
        inside.set()
        threading.Event().wait()
        return x

    threading.Thread(target=symbolic_trace, args=(traced,), name="daemon", daemon=True).start()
    assert inside.wait(30)
    """
    done, data = run(program, options=(hooks,))
    assert done.returncode == 0 and data == {}, done.stderr
    assert "not audited: daemon still compiles" in done.stderr


@pytest.mark.parametrize("holds_the_lock", [False, True])
def test_a_hang_inside_a_compile_is_ended_with_all_stacks(run, tmp_path, holds_the_lock):
    """Waiting for ever in Python, and in native code that keeps the interpreter's lock."""
    wait = "ctypes.PyDLL(None).pause()" if holds_the_lock else "threading.Event().wait()"
    program = f"""
    import ctypes, threading
    import torch

    def backend(graph, inputs):
        {wait}

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=compiled, args=(torch.ones(2),), name="drafter-0")
    thread.start()
    thread.join()
    """
    done, data = run(program, options=("--hang", "2"))
    assert done.returncode == (128 + signal.SIGABRT if holds_the_lock else 1), done.stderr
    assert data["process"]["hung"] and "no progress for 2 s" in data["process"]["ended"]
    assert "backend" in (tmp_path / "harness-report" / "stacks.txt").read_text()


def test_a_native_crash_is_reported_with_its_stacks(run, tmp_path):
    program = """
    import ctypes, threading
    import torch

    def backend(graph, inputs):
        ctypes.string_at(0)

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=compiled, args=(torch.ones(2),))
    thread.start()
    thread.join()
    """
    done, data = run(program)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "died by SIGSEGV" in done.stderr
    assert "Segmentation fault" in data["process"]["ended"]
    assert data["versions"]["torch"] and data["unaudited"] == "the process died"
    assert "in backend" in (tmp_path / "harness-report" / "stacks.txt").read_text()


WORKER = """
import ctypes, multiprocessing, sys
import torch._dynamo

def work():
    {does}

if __name__ == "__main__":
    worker = multiprocessing.get_context("{method}").Process(target=work, name="worker")
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_an_exception_that_ends_a_worker_process_is_found(run, tmp_path, method):
    """Multiprocessing prints it by itself: neither hook of Python's is asked."""
    done, data = run(WORKER.format(method=method, does="raise LookupError('in the worker')"))
    assert done.stdout == "1\n" and done.returncode == 1, done.stderr
    assert "LookupError: in the worker" in done.stderr  # multiprocessing's own words stay
    assert data == {}
    (folder,) = (tmp_path / "harness-report").iterdir()
    (failed,) = json.loads((folder / "crash.json").read_text())["failures"]
    assert failed["error"]["type"] == "LookupError" and failed["died"]


def test_a_worker_process_that_ends_well_counts_for_a_clean_result(run):
    """The negative control, with calls in the worker that only its own end can tell of."""
    does = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)); sys.exit(0)"
    done, data = run(WORKER.format(method="fork", does=does))
    assert done.stdout == "0\n" and done.returncode == 0, done.stderr
    assert data == {} and "clean: 1 compiled calls in 1 threads" in done.stderr


def test_what_a_worker_inherits_from_a_thread_of_its_parent_is_not_its_own(run):
    """It is forked while a thread traces: the state is up in it from the first moment on."""
    program = """
    import multiprocessing, threading
    import torch._dynamo
    from torch.fx import symbolic_trace

    inside, done = threading.Event(), threading.Event()

    def traced(x):
        inside.set()
        done.wait(60)
        return x

    thread = threading.Thread(target=symbolic_trace, args=(traced,))
    thread.start()
    assert inside.wait(30)
    worker = multiprocessing.get_context("fork").Process(target=print, args=("worked",))
    worker.start()
    worker.join()
    done.set()
    thread.join()
    """
    done, data = run(program)
    assert done.stdout == "worked\n" and done.returncode == 0, done.stderr
    assert data == {} and "compile state at rest" in done.stderr


def test_a_worker_process_that_dies_in_native_code_is_found(run, tmp_path):
    done, data = run(WORKER.format(method="fork", does="ctypes.string_at(0)"))
    assert done.stdout == f"{-signal.SIGSEGV}\n" and done.returncode == 1, done.stderr
    assert data == {}  # nothing happened to the parent
    (folder,) = (tmp_path / "harness-report").iterdir()
    assert "in work" in (folder / "stacks.txt").read_text()


def test_a_crash_after_the_last_handler_at_exit_is_found(run):
    """Destructors run when the process has said already that it was clean."""
    program = """
    import ctypes
    import torch._dynamo

    class Native:
        def __del__(self, crash=ctypes.string_at):
            crash(0)

    kept = Native()
    """
    done, data = run(program)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "the process died: Segmentation fault" in done.stderr and "clean" not in done.stderr
    assert data["process"]["native"]


def test_an_error_of_the_harness_is_not_called_clean(run):
    program = """
    import sys
    import torch._dynamo
    recorder = sys.modules["_race_harness.inject.agent"].agent.recorder
    recorder._ring = None
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    print(compiled(torch.ones(2)).tolist())
    """
    done, data = run(program)
    assert done.stdout == "[2.0, 2.0]\n" and data == {}
    assert "harness: stops watching at" in done.stderr
    assert "clean" not in done.stderr and done.returncode == 2


def test_a_python_child_has_its_own_folder(run, tmp_path):
    program = """
    import os, subprocess, sys
    import torch._dynamo
    if len(sys.argv) == 1:
        print(subprocess.run([sys.executable, __file__, "child"]).returncode)
    else:
        raise LookupError("in the child")
    """
    done, data = run(program)
    assert done.stdout == "1\n" and done.returncode == 1, done.stderr
    assert data == {}
    (folder,) = (tmp_path / "harness-report").iterdir()
    assert folder.name.startswith("process-")
    assert "MainThread died of LookupError" in done.stderr


def test_without_hooks_a_dead_thread_and_stuck_state_are_still_found(run):
    done, data = run("CAUGHT = False\n" + HELD, options=(*UNFIX, "--no-hooks"))
    assert done.returncode == 1
    assert data["failures"][0]["thread"] == "victim"
    assert data["facts"]["hooks"] is False and data["counts"]["events"] == 0


def test_perturbation_brings_out_what_forward_only_drafters_hide(run):
    """The threads of compile_races part 7 without gradients, which do not fail by themselves."""
    done, data = run(DRAFTERS, "12", "--forward-only", options=(*UNFIX, "--perturb", "1"))
    assert done.returncode == 1, done.stderr
    assert data["schedule"]["seed"] == 1
    ended = [wait["ended"] for wait in data["schedule"]["waits"]]
    assert any(word.startswith("fulfilled") for word in ended)
    states = {failure["culprit"]["state"] for failure in data["failures"]}
    assert states and states <= {"fx-tracing-flag", "traceback-meta"}


def test_perturbation_of_a_repaired_program_finds_nothing_and_does_not_stop_it(run):
    """The negative control: two compiled functions, and one lock of the program round every call.

    Without the lock ``_is_in_torch_dispatch_mode`` stays True on torch 2.13.0, seed or no seed.
    """
    program = """
    import threading
    import torch

    functions = [
        torch.compile(lambda x: x.sin().cos(), backend="aot_eager", dynamic=False),
        torch.compile(lambda x: x.cos().sin(), backend="aot_eager", dynamic=False),
    ]
    lock = threading.Lock()

    def work(function):
        for size in (2, 2, 3, 3, 4, 4):
            with lock:
                function(torch.ones(size))

    threads = [threading.Thread(target=work, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    """
    done, data = run(program, options=("--perturb", "6"))
    assert done.returncode == 0, done.stderr
    assert data == {}
    assert "clean: 12 compiled calls in 2 threads, 0 of them beside" in done.stderr
