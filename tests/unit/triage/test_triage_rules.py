"""Every cause has its rule, a bad rule is refused, a race is told from a nested trace."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness.triage import rules, search, triage_text
from harness.triage.roles import TorchVersion

CAUSES = tomllib.loads((Path(__file__).parents[2] / "triage" / "causes.toml").read_text())
NO_RULE = {"none", "unknown", "not-in-a-log"}


def test_every_cause_has_one_rule_and_every_rule_a_cause():
    ids = [rule.id for rule in rules.load()]
    assert sorted(ids) == sorted(CAUSES.keys() - NO_RULE)
    assert all((rules.FOLDER / f"{name}.toml").is_file() for name in ids)


@pytest.mark.parametrize("rule", rules.load(), ids=lambda rule: rule.id)
def test_a_rule_says_what_a_reader_needs(rule):
    assert rule.why and rule.state and rule.fix and rule.guard and rule.references and rule.next


def test_the_literals_stay_few_enough_for_a_fast_search():
    assert len(search().literals) <= 128


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('id = "x"', "title is missing"),
        ('id = "x"\ntitel = "y"', "unknown field 'titel'"),
        ('id="x"\ntitle="y"\nwhy="z"\n[[matches]]\nmassage="a"\nconfidence="high"', "massage"),
        ('id="x"\ntitle="y"\nwhy="z"\n[[matches]]\nmessage="a"\nconfidence="sure"', "confidence"),
        ('id="x"\ntitle="y"\nwhy="z"\n[[matches]]\nmessage="("\nconfidence="high"', "match 1"),
        ("id = ", "x.toml"),
    ],
)
def test_a_bad_rule_is_refused_in_one_line(tmp_path, text, what):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(rules.BadRule, match=what):
        rules.read(path)


@pytest.mark.parametrize(
    ("version", "text", "holds"),
    [
        ("2.13.0", "<2.14", True), ("2.14.0", "<2.14", False), ("2.14.1", ">=2.14", True),
        ("2.11.0", ">=2.12", False), ("2.12.1", ">=2.12,<2.14", True), ("2.9.1", "==2.9", True),
        ("2.10.0", "==2.9", False), ("2.9.1", "<=2.9", True), ("2.9.1", ">2.9", False),
        ("2.10.0", ">2.9", True), ("2.9.1", "", True),
    ],
)  # fmt: skip
def test_ranges_of_versions(version, text, holds):
    assert rules.in_range(TorchVersion(version, "stated"), text) is holds
    assert rules.in_range(TorchVersion(), text)


def stack(*frames, thread="drafter-1"):
    head = [f"Exception in thread {thread}:"] if thread else []
    body = []
    for file, line, function, source in frames:
        body += [f'  File "{file}", line {line}, in {function}', f"    {source}"]
    end = (
        "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized "
        "function. This is not supported at the moment."
    )
    return "\n".join([*head, "Traceback (most recent call last):", *body, end]) + "\n"


SITE = "/v/lib/python3.12/site-packages/"
BOOT = ("/usr/lib/python3.12/threading.py", 1073, "_bootstrap_inner", "self.run()")
STEP = ("/opt/train.py", 9, "step", "y = net(x)")
RAISE = (f"{SITE}torch/_dynamo/eval_frame.py", 989, "compile_wrapper", "raise RuntimeError(")
TRACE = (f"{SITE}torch/fx/_symbolic_trace.py", 879, "trace", "(self.create_arg(fn(*args)),),")


def test_a_race_and_a_nested_trace_are_told_apart_by_the_stack():
    race = triage_text(stack(BOOT, STEP, RAISE)).causes
    assert (race[0].id, race[0].confidence) == ("fx-flag-other-thread", "high")
    nested = triage_text(stack(BOOT, TRACE, STEP, RAISE)).causes
    assert (nested[0].id, nested[0].confidence) == ("fx-nested-trace-same-thread", "high")
    assert all(c.confidence != "high" for c in (*race[1:], *nested[1:]))


def test_confidence_is_lower_where_the_stack_does_not_show_the_thread_s_beginning():
    (first, *_) = triage_text(stack(STEP, RAISE, thread=None)).causes
    assert (first.id, first.confidence) == ("fx-flag-other-thread", "medium")
    message = stack(STEP, RAISE).splitlines()[-1]
    (first, second) = triage_text(f"ERROR {message}\n").causes
    assert (first.id, first.confidence) == ("fx-flag-other-thread", "low")
    assert (second.id, second.alternative) == ("fx-nested-trace-same-thread", True)


def test_a_torch_whose_flag_is_per_thread():
    frame = (RAISE[0], 1209, *RAISE[2:])
    (first, *_) = triage_text("torch 2.14.1\n" + stack(STEP, frame, thread=None)).causes
    assert first.id == "fx-nested-trace-same-thread" and first.confidence != "high"
    (first, *_) = triage_text("torch 2.14.1\n" + stack(BOOT, STEP, frame)).causes
    assert (first.id, first.confidence) == ("fx-flag-other-thread", "medium")


def test_a_failure_without_a_rule_is_unknown_and_not_guessed():
    text = "Traceback (most recent call last):\n" + '  File "/opt/a.py", line 3, in f\n    g()\n'
    (cause,) = triage_text(text + "KeyError: 'custom'\n").causes
    assert (cause.id, cause.confidence) == ("unknown", "low")
    assert "KeyError: 'custom'" in cause.why and "/opt/a.py:3 f" in cause.why


def test_lines_beside_a_failure_do_not_explain_it():
    text = (
        "W1130 17:10:21.441000 9346 torch/_dynamo/convert_frame.py:1994] [0/8] torch._dynamo hit "
        "config.recompile_limit (8)\n"
    )
    (alone,) = triage_text(text).causes
    assert alone.id == "recompile-limit-shared-cache"
    first, *rest = triage_text(
        text + "Traceback (most recent call last):\n" + '  File "/opt/a.py", line 3, in f\n'
        "    g()\nZeroDivisionError: division by zero\n"
    ).causes
    assert first.id == "unknown" and [cause.id for cause in rest] == [alone.id]


def test_a_consequence_stands_behind_its_cause():
    watchdog = (
        "[rank1]:[E304 08:10:01.119 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=44, OpType=ALLREDUCE) ran for 600101 milliseconds\n"
    )
    (alone,) = triage_text(watchdog).causes
    assert (alone.id, alone.confidence) == ("nccl-watchdog-timeout", "high")
    first, *rest = triage_text(stack(BOOT, STEP, RAISE) + watchdog).causes
    assert first.id == "fx-flag-other-thread" and not first.secondary
    after = next(cause for cause in rest if cause.id == "nccl-watchdog-timeout")
    assert after.secondary and after.confidence == "low"


OVERLAP = """\
pytorch 2.12.0
Exception in thread capture-1:
Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1073, in _bootstrap_inner
    self.run()
  File "/opt/capture.py", line 9, in capture
    graph = wrap(net)
RuntimeError: lost the module hooks: AssertionError: CURRENT_PATCHER is None in finally block
after the captures: _is_fx_tracing_flag = True
Exception in thread serve-1:
Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1073, in _bootstrap_inner
    self.run()
  File "/opt/serve.py", line 9, in step
    y = net(x)
  File "/opt/site-packages/torch/_dynamo/eval_frame.py", line 1011, in compile_wrapper
    raise RuntimeError(
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function.
"""


def test_a_flag_left_by_overlapping_traces_is_not_blamed_on_a_running_one():
    diagnosis = triage_text(OVERLAP)
    assert [diagnosis.cause_of(index).id for index in (0, 1)] == [
        "patcher-not-none", "fx-flag-stuck",
    ]  # fmt: skip
    other = {cause.id: cause for cause in diagnosis.causes}["fx-flag-other-thread"]
    assert other.alternative and other.confidence == "low"
    unread = "\n".join(line for line in OVERLAP.split("\n") if "_is_fx_tracing_flag" not in line)
    assert not [
        cause.id
        for cause in triage_text(unread).causes
        if cause.confidence == "high" and cause.id == "fx-flag-other-thread"
    ]


STANCE = "thread b left its block; stance is still force_eager; 0 graphs compiled\n"


@pytest.mark.parametrize(
    ("level", "confidence"), [("INFO ", "low"), ("WARNING ", "high"), ("", "high")]
)
def test_lines_that_a_program_tells_as_a_matter_of_course_are_no_sure_sign(level, confidence):
    (cause,) = triage_text("step 1\n" + level + STANCE + "step 2\n").causes
    assert (cause.id, cause.confidence) == ("stance-shared", confidence)


@pytest.mark.parametrize(
    "line",
    [
        "INFO default device cpu for the data workers",
        "INFO backend=inductor, math_attention as reference",
        "INFO CUDA out of memory errors so far: 0",
        "INFO signal 11 handler installed (faulthandler)",
        "INFO torch._dynamo.reset() between trials",
        "INFO deadlock detection enabled, timeout 600 s",
        "I0902 10:00:00.000000 9 ProcessGroupNCCL.cpp:1200] watchdog thread started!",
        "INFO torch._dynamo.config.cache_size_limit=64 set in all 4 worker threads",
    ],
)
def test_a_line_of_a_healthy_run_is_no_cause(line):
    assert triage_text(f"step 1 loss 2.0\n{line}\nstep 2 loss 1.9\ndone\n").exit_code == 0


OWN = (
    'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in <module>\n    g()\n'
    "ValueError: no row\n"
)
WATCHDOG = (
    "[rank1]:[E102 21:00:01.000 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=7, OpType=BROADCAST, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
)
KILLED = (
    "E0909 06:10:09.000000 77 torch/distributed/elastic/multiprocessing/api.py:984] failed"
    " (exitcode: -9) local_rank: 2 (pid: 9112) of binary: /opt/venv/bin/python\n"
)


def test_peers_that_time_out_follow_from_the_rank_that_was_killed():
    """The launcher tells the kill last; an abort of the watchdog itself is no kill."""
    first, *more = triage_text(WATCHDOG + KILLED).causes
    assert (first.id, first.confidence, first.secondary) == ("rank-killed", "high", False)
    assert [(c.id, c.confidence, c.secondary) for c in more] == [
        ("nccl-watchdog-timeout", "low", True)
    ]
    first, *more = triage_text(WATCHDOG + KILLED.replace("-9", "-6")).causes
    assert first.id == "nccl-watchdog-timeout" and not more


@pytest.mark.parametrize(
    ("text", "first", "failures"),
    [
        (OWN + WATCHDOG, "unknown", (0,)),  # the failure that nobody explains came first
        (WATCHDOG + OWN, "nccl-watchdog-timeout", (0,)),
        (OWN + KILLED, "rank-killed", (1,)),  # the launcher tells a kill last, whenever it was
        ("^CTraceback (most recent call last):\n  File \"/opt/a.py\", line 3, in f\n    g()\n"
         "KeyboardInterrupt\n" + WATCHDOG, "nccl-watchdog-timeout", (1,)),
    ],
)  # fmt: skip
def test_what_only_follows_does_not_explain_an_earlier_failure(text, first, failures):
    causes = triage_text(text).causes
    assert (causes[0].id, causes[0].failures) == (first, failures)
    assert first != "unknown" or [c.confidence for c in causes[1:]] == ["low"]
    assert first != "unknown" or all(c.secondary for c in causes[1:])
