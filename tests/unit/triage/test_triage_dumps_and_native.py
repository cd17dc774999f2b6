"""Stacks of living threads, and failures that are no Python exceptions."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

from harness.triage import triage_text
from harness.triage.events import Kind


def test_what_faulthandler_prints_is_what_is_read():
    entered, leave = threading.Event(), threading.Event()

    def wait_there():
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=wait_there)
    thread.start()
    assert entered.wait(30)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        leave.set()
        thread.join(30)
        file.seek(0)
        text = file.read()
    diagnosis = triage_text("step 1\n" + text + "step 2\n")
    (dump,) = diagnosis.dumps
    assert diagnosis.exit_code == 0 and not diagnosis.failures
    assert any("wait_there" in [f.function for f in s.frames] for s in dump.event.stacks)
    current = next(s for s in dump.event.stacks if s.state == "current")
    assert current.frames[-1].function == "test_what_faulthandler_prints_is_what_is_read"


def test_a_fatal_error_is_a_failure_with_the_crashing_stack():
    text = (
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f01 (most recent call first):\n"
        '  File "/opt/a.py", line 3 in inner\n  File "/opt/a.py", line 9 in outer\n\n'
        "Thread 0x00007f02 (most recent call first):\n  <no Python frame>\n\n"
        "Extension modules: numpy (total: 1)\n"
    )
    (group,) = triage_text(text).failures
    assert group.event.kind is Kind.FATAL and group.event.type == "Segmentation fault"
    assert [f.function for f in group.event.frames] == ["outer", "inner"]
    assert len(group.event.stacks) == 2


def test_a_dump_of_py_spy():
    text = (
        "Process 5120: python main.py\nPython v3.12.3 (/opt/bin/python3.12)\n\n"
        'Thread 5120 (idle): "MainThread"\n    acquire (threading.py:10)\n'
        "    <module> (main.py:19)\n"
        'Thread 5121 (active+gil): "drafter-0"\n    run (main.py:4)\n'
    )
    diagnosis = triage_text(text)
    (dump,) = diagnosis.dumps
    assert diagnosis.exit_code == 0
    assert [(s.thread, s.state) for s in dump.event.stacks] == [
        ("MainThread", "idle"), ("drafter-0", "active+gil"),
    ]  # fmt: skip
    assert [f.function for f in dump.event.stacks[0].frames] == ["<module>", "acquire"]


@pytest.mark.parametrize(
    ("text", "kind", "type_", "rank"),
    [
        ("[1.5] Out of memory: Killed process 44 (python) total-vm:1kB\nKilled\n", Kind.KILLED,
         "SIGKILL", None),
        ("run.sh: line 3:  4242 Segmentation fault      (core dumped) python train.py\n",
         Kind.KILLED, "SIGSEGV", None),
        ("E0314 09:12:33.123000 5 torch/x.py:874] failed (exitcode: -11) local_rank: 2 (pid: 77) "
         "of binary: python\n", Kind.KILLED, "SIGSEGV", "2"),
        ("[rank1]:[E304 08:10:01.119 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective "
         "operation timeout: WorkNCCL(SeqNum=44, OpType=ALLREDUCE, NumelIn=2, NumelOut=2, "
         "Timeout(ms)=600000) ran for 600101 milliseconds before timing out.\n", Kind.WATCHDOG,
         "NCCL watchdog", "1"),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: x\n"
         "frame #0: c10::f() + 0x57\n", Kind.NATIVE, "terminate", None),
    ],
)  # fmt: skip
def test_a_native_failure(text, kind, type_, rank):
    (group,) = triage_text("step 1\n" + text).failures
    assert (group.event.kind, group.event.type, group.event.rank) == (kind, type_, rank)


def test_details_of_the_watchdog_and_of_terminate():
    text = (
        "[rank1]:[E304 08:10:01.119 P.cpp:683] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=44, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600101 "
        "milliseconds before timing out.\n"
    )
    (group,) = triage_text(text).failures
    assert group.event.details == {
        "sequence": 44, "operation": "ALLREDUCE", "timeout_ms": 600000, "ran_ms": 600101,
    }  # fmt: skip
    text = "terminate called after throwing an instance of 'X'\n  what():  bad\nframe #0: f() + 1\n"
    (group,) = triage_text(text).failures
    assert group.event.message == "bad" and group.event.details["native_frames"] == ["f() + 1"]


def test_torchrun_s_summary_names_the_rank_that_a_signal_ended():
    text = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-04_08:00:07
  host      : node7
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 4477)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4477
============================================================
"""
    (group,) = triage_text(text).failures
    assert (group.event.type, group.event.rank) == ("SIGKILL", "3")
    assert group.event.details["host"] == "node7"


@pytest.mark.parametrize(
    "text",
    [
        "Killed 3 stale workers and went on\n",
        "SIGUSR1: stacks on request\n",
        "watchdog armed, timeout 600 s\n",
        "exitcode of the check: 0\n",
    ],
)
def test_words_of_signals_are_no_kill(text):
    assert triage_text(text).exit_code == 0


FATAL = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f1c33fff640 (most recent call first):
  File "/srv/a.py", line 33 in swap

"""


@pytest.mark.parametrize(
    ("own", "told", "signals"),
    [
        (FATAL, "Segmentation fault (core dumped)\n", 1),
        (FATAL.replace("Segmentation fault", "Bus error"), "Bus error (core dumped)\n", 1),
        (FATAL.replace("Segmentation fault", "deadlock"), "Aborted (core dumped)\n", 1),
        ("terminate called without an active exception\n", "Aborted (core dumped)\n", 1),
        (FATAL, "Killed\n", 2),  # another signal is another death
        (FATAL, "Segmentation fault (core dumped)\nstep\nSegmentation fault (core dumped)\n", 1),
        ("", "Segmentation fault (core dumped)\n", 1),
    ],
)
def test_a_crash_that_a_shell_tells_too_is_one(own, told, signals):
    failures = triage_text("step 1\n" + own + told).failures
    assert sum(group.count for group in failures) == signals


CHILD = """\
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED
"""


def test_a_launcher_s_exception_is_no_failure_beside_its_process_s():
    own = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/a.py", line 1, in f\n'
    own += "[rank1]: ValueError: no\n"
    (group,) = triage_text(own + CHILD).failures
    assert (group.event.type, group.threads) == ("ValueError", ["rank1"])
    (group,) = triage_text(CHILD).failures
    assert group.event.short_type == "ChildFailedError"


OWN = """\
Traceback (most recent call last):
  File "/a.py", line 1, in f
    g()
ValueError: no
"""


def test_a_launcher_that_only_reports_a_command_is_known_by_its_frames():
    told = "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.\n"
    stack = 'Traceback (most recent call last):\n  File "{}", line 763, in launch\n    g()\n' + told
    launcher = stack.format("/opt/site-packages/accelerate/commands/launch.py")
    assert [g.event.type for g in triage_text(OWN + launcher).failures] == ["ValueError"]
    others = [g.event.short_type for g in triage_text(OWN + stack.format("/opt/a.py")).failures]
    assert others == ["ValueError", "CalledProcessError"]


def test_a_process_s_exception_in_a_launcher_s_message_is_the_failure():
    text = (
        'Traceback (most recent call last):\n  File "/opt/main.py", line 30, in <module>\n'
        "torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
        "-- Process 1 terminated with the following error:\n"
    )
    assert [group.event.type for group in triage_text(text + OWN).failures] == ["ValueError"]


def test_each_rank_s_crash_is_told_again_by_the_launcher():
    ranks = "".join(
        f"[rank{r}]: Fatal Python error: Segmentation fault\n[rank{r}]: \n"
        f"[rank{r}]: Current thread 0x00007f1c33fff64{r} (most recent call first):\n"
        f'[rank{r}]:   File "/srv/a.py", line 33 in swap\n'
        for r in (0, 1)
    )
    line = "E0614 11:02:49.551000 310 torch/distributed/elastic/multiprocessing/api.py:984] failed "
    line += "(exitcode: {}) local_rank: {} (pid: 403) of binary: python\n"
    for code, rank, deaths in ((-11, 0, 2), (-11, 1, 2), (-11, 3, 3), (-9, 0, 3)):
        failures = triage_text(ranks + line.format(code, rank)).failures
        assert sum(group.count for group in failures) == deaths


def test_a_job_that_slurm_cancels_was_killed():
    text = "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO {} ***\n"
    for why in ("TIME LIMIT", "PREEMPTION"):
        diagnosis = triage_text("step 1\n" + text.format(why))
        assert diagnosis.causes[0].id == "rank-killed" and diagnosis.exit_code == 1
