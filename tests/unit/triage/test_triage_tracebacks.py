"""Tracebacks in all the forms in which logs hold them, each beside something that is none."""

from __future__ import annotations

import random
import traceback

import pytest

from harness.triage import triage_text
from harness.triage.events import Kind


def only(text):
    (group,) = triage_text(text).failures
    return group


ONE = """\
Traceback (most recent call last):
  File "/opt/a.py", line 3, in <module>
    f()
    ~^^
  File "/opt/a.py", line 2, in f
    raise ValueError("no")
ValueError: no
"""


def test_a_plain_traceback_with_carets_and_source():
    group = only("step 1\n" + ONE + "step 2\n")
    assert group.event.type == "ValueError" and group.event.message == "no"
    assert [f.source for f in group.event.frames] == ["f()", 'raise ValueError("no")']
    assert group.threads == ["MainThread"] and group.event.whole
    assert str(group.first) == "-:2"


def test_what_python_prints_is_what_is_read():
    def inner():
        raise KeyError("x")

    try:
        try:
            inner()
        except KeyError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
    event = only(text).event
    assert (event.type, event.message) == ("RuntimeError", "outer")
    assert [cause.type for cause in event.causes] == ["KeyError"]
    assert event.causes[0].frames[-1].function == "inner"


def test_an_exception_group_gives_its_members():
    members = []
    for error in (ValueError("a"), KeyError("b")):
        try:
            raise error
        except Exception as caught:
            members.append(caught)
    try:
        raise ExceptionGroup("several", [*members, OSError("bare")])
    except ExceptionGroup as group:
        text = "".join(traceback.format_exception(group))
    types = {g.event.type: len(g.event.frames) for g in triage_text(text).failures}
    assert types == {"ValueError": 1, "KeyError": 1, "OSError": 0}


def test_an_exception_group_without_its_members_stands_for_itself():
    text = "Traceback (most recent call last):\n" + '  File "/opt/a.py", line 3, in f\n    g()\n'
    assert (
        only(text + "ExceptionGroup: several (2 sub-exceptions)\n").event.type == "ExceptionGroup"
    )
    cut = (
        text
        + "ExceptionGroup: several (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
    )
    assert only(cut).event.type == "ExceptionGroup"


def test_a_thread_is_named_by_its_excepthook():
    text = ONE.replace("<module>", "_bootstrap_inner")
    group = only("Exception in thread drafter-1:\n" + text)
    assert group.threads == ["drafter-1"]
    group = only("Exception in thread Thread-3 (worker):\n" + text)
    assert group.threads == ["Thread-3 (worker)"]


def test_a_program_s_own_words_name_the_thread():
    text = "CRITICAL 14:02:55 worker-3 uncaught exception\n" + ONE
    assert only(text).threads == ["worker-3"]
    assert only("2026-01-01 10:00:00 ERROR reading utf-8 failed\n" + ONE).threads == ["MainThread"]


def test_equal_failures_are_said_once_with_their_count():
    text = "".join(
        f"Exception in thread w-{n}:\n" + ONE.replace("<module>", "run") + f"step {n}\n"
        for n in range(5)
    )
    group = only(text)
    assert group.count == 5 and group.threads == [f"w-{n}" for n in range(5)]
    assert group.first.line == 2 and group.last.line == 2 + 4 * 9


def test_two_threads_that_print_line_by_line():
    lines = ONE.replace("<module>", "run").splitlines()
    head = ["Exception in thread a-1:", "Exception in thread b-2:"]
    text = "\n".join([*head, *(line for line in lines for _ in range(2))]) + "\n"
    group = only(text)
    assert group.count == 2 and sorted(group.threads) == ["a-1", "b-2"]
    assert len(group.event.frames) == 2


@pytest.mark.parametrize("seed", range(12))
def test_threads_whose_lines_mix_at_random(seed):
    """With one traceback of the kind seen whole before, each of the mixed ones is put together."""
    rng = random.Random(seed)
    body = ONE.replace("<module>", "_bootstrap_inner").splitlines()
    left = [[f"Exception in thread {name}-1:", *body] for name in "bcd"]
    mixed = ["Exception in thread a-1:", *body]
    while any(left):
        mixed.append(rng.choice([lines for lines in left if lines]).pop(0))
    diagnosis = triage_text("\n".join(mixed) + "\n")
    assert sum(group.count for group in diagnosis.failures) == 4
    assert {who for group in diagnosis.failures for who in group.threads} == {
        "a-1", "b-1", "c-1", "d-1",
    }  # fmt: skip
    assert {group.event.type for group in diagnosis.failures} == {"ValueError"}
    assert all(len(group.event.frames) == 2 for group in diagnosis.failures)


def test_ranks_that_mix_their_lines():
    lines = ONE.splitlines()
    text = "\n".join(f"[rank{n}]: {line}" for line in lines for n in range(3)) + "\n"
    group = only(text)
    assert group.count == 3 and group.threads == ["rank0", "rank1", "rank2"]


def test_other_output_in_the_middle():
    lines = ONE.splitlines()
    text = "\n".join([*lines[:3], "step 7 loss 2.0", "a word", *lines[3:]]) + "\n"
    event = only(text).event
    assert event.type == "ValueError" and len(event.frames) == 2


def test_a_beginning_that_is_cut_off():
    event = only("\n".join(ONE.splitlines()[2:]) + "\n").event
    assert event.type == "ValueError" and not event.whole and len(event.frames) == 1


def test_an_end_that_is_cut_off():
    event = only("\n".join(ONE.splitlines()[:4]) + "\n").event
    assert event.kind is Kind.FRAMES and event.type == ""


def test_frames_without_source_lines():
    text = "\n".join(line for line in ONE.splitlines() if not line.startswith("    ")) + "\n"
    event = only(text).event
    assert event.type == "ValueError" and [f.source for f in event.frames] == ["", ""]


def test_the_message_of_dynamo_with_user_code():
    text = ONE.replace(
        "ValueError: no",
        "torch._dynamo.exc.Unsupported: no\n  Explanation: why\n\nfrom user code:\n"
        '   File "/opt/net.py", line 9, in forward\n    return x\n\n'
        "Set TORCHDYNAMO_VERBOSE=1 for it",
    )
    event = only(text).event
    assert event.short_type == "Unsupported" and "Explanation" in event.message
    assert event.details["user_code"] == ["/opt/net.py:9 forward"]


def test_an_original_traceback_inside_a_message():
    inner = ONE.replace("Traceback", "Original Traceback").replace("ValueError: no", "KeyError: 1")
    text = ONE.replace("ValueError: no", "KeyError: Caught KeyError in worker.") + inner
    event = only(text).event
    assert [cause.type for cause in event.causes] == ["KeyError"]


@pytest.mark.parametrize(
    "before",
    ["2026-01-01 10:00:00 WARNING fetch failed, retrying", "INFO falling back to the slow path"],
)
def test_a_failure_that_the_program_dealt_with_is_none(before):
    diagnosis = triage_text(f"{before}\n{ONE}step 2\n")
    assert not diagnosis.failures and diagnosis.exit_code == 0
    assert [group.event.type for group in diagnosis.handled] == ["ValueError"]


@pytest.mark.parametrize(
    "before",
    [
        "2026-01-01 10:00:00 INFO step 1 loss 2.0",
        "2026-01-01 10:00:00 WARNING low disk",
        "ERROR drafter-1 died",
        "validation error 0.3",
    ],
)
def test_the_line_before_a_crash_is_mostly_about_something_else(before):
    assert only(f"{before}\n{ONE}step 2\n").event.type == "ValueError"


def test_nothing_was_dealt_with_when_nothing_follows():
    assert only("WARNING fetch failed, retrying\n" + ONE).event.type == "ValueError"


@pytest.mark.parametrize(
    "text",
    [
        "error 0.5\nvalidation error 3\n",
        "test_error_handling PASSED\n",
        "WARNING ConnectionResetError: retrying in 3 s\n",
        "Finished: 0 failed, no Exception\n",
        "see RuntimeError: in the documentation of torch.compile\n",
    ],
)
def test_the_word_error_is_no_failure(text):
    diagnosis = triage_text(text)
    assert diagnosis.exit_code == 0 and not diagnosis.failures


def test_an_exception_stated_beside_its_traceback_counts_once():
    text = "2026-01-01 10:00:00 ERROR drafter-1 died: ValueError: no\n" + ONE
    group = only(text)
    assert group.count == 1 and group.threads == ["drafter-1"]


def test_a_notebook_s_form():
    text = (
        "RuntimeError                              Traceback (most recent call last)\n"
        "File /opt/v/lib/python3.12/site-packages/torch/fx/_symbolic_trace.py:1377, in "
        "symbolic_trace(root)\n   1376     x = 1\n--> 1377     graph = tracer.trace(root)\n\n"
        "RuntimeError: boom\n"
    )
    (frame,) = only(text).event.frames
    assert (frame.file, frame.line, frame.function, frame.source) == (
        "torch/fx/_symbolic_trace.py", 1377, "symbolic_trace", "graph = tracer.trace(root)",
    )  # fmt: skip


def test_a_line_of_level_error_counts_only_when_nothing_else_failed():
    line = "10:00:00 ERROR run stopped: no batch\n"
    assert only(line).event.kind is Kind.ERROR
    assert only(line + ONE).event.type == "ValueError"


FAILURE_IN_CHAT = (
    'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in f\n    g()\n'
    "ValueError: no\n"
)
CHAT = "<|im_start|>user\nwhy?\n" + FAILURE_IN_CHAT + "<|im_end|>\n"


def test_a_traceback_inside_a_printed_conversation_is_no_failure():
    assert triage_text("INFO first row:\n" + CHAT + "INFO step 1\n").exit_code == 0


@pytest.mark.parametrize(
    "text",
    [
        FAILURE_IN_CHAT.replace(": no", ": other") + CHAT,  # before it
        CHAT + FAILURE_IN_CHAT,  # behind it
        CHAT.replace("<|im_end|>", ""),  # a turn that does not end: it may be a cut sample
        "<|im_start|>user\nhi\nINFO 10:00:00 step 1\n" + FAILURE_IN_CHAT + "<|im_end|>\n",
    ],
)
def test_a_traceback_beside_a_conversation_is_a_failure(text):
    (group,) = triage_text(text).failures
    assert group.event.type == "ValueError" and group.count == 1


def test_a_stack_with_frames_left_out_is_not_whole():
    lines = FAILURE_IN_CHAT.splitlines(keepends=True)
    for mark in ("... 214 lines omitted ...\n", "[...]\n", "(log truncated)\n"):
        (group,) = triage_text("".join([*lines[:3], mark, *lines[3:]])).failures
        assert not group.event.whole and group.event.details["cut"]
    (group,) = triage_text(FAILURE_IN_CHAT).failures
    assert group.event.whole and "cut" not in group.event.details


def test_a_very_deep_stack_says_that_its_middle_is_missing():
    deep = "".join(f'  File "/opt/a.py", line {n}, in f{n}\n    g()\n' for n in range(1, 300))
    text = "Traceback (most recent call last):\n" + deep + "ValueError: no\n"
    (group,) = triage_text(text).failures
    assert group.event.details["cut"] and not group.event.whole


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        (">       assert f() == 4\nE       assert 3 == 4\n\nt/x.py:14: AssertionError\n", "ERROR"),
        ("FAILED tests/x.py::test_a[1-2] - assert 3 == 4\n", "ERROR"),
        (">       f()\nE       ValueError: no\n\nt/x.py:14: ValueError\n", "ValueError"),
    ],
)
def test_a_failure_as_pytest_reports_it(text, type_):
    (group,) = triage_text(text).failures
    assert group.event.type == type_


@pytest.mark.parametrize("text", ["FAILED to load plugin x, using y\n", "t/x.py:14: in call\n"])
def test_lines_that_only_look_like_pytest_s(text):
    assert triage_text(text).exit_code == 0


BELOW = 'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in f\n    g()\n'
QUOTED = (BELOW + "KeyError: 1").replace("\n", "\\n")


@pytest.mark.parametrize(
    "text",
    [
        f"done\nException ignored in: <function A.__del__ at 0x7f>\n{BELOW}ImportError: no\n",
        f"--- Logging error ---\n{BELOW}TypeError: not all arguments converted\nCall stack:\n"
        "  File \"/opt/a.py\", line 30, in <module>\n    main()\nMessage: 'x'\nArguments: (1,)\n",
        "".join(  # what TORCH_LOGS=graph_breaks writes
            "V0401 07:11:00.000000 40 torch/_dynamo/symbolic_convert.py:529] [0/0]"
            f" [__graph_breaks] {line}\n"
            for line in f"Reason: print\n{BELOW}torch._dynamo.exc.Unsupported: print".split("\n")
        )
        + "step 2\n",
        f"INFO request 1: prompt: 'why? {QUOTED}', n=1\nstep 2\n",
    ],
)
def test_a_traceback_of_which_nothing_came_is_no_failure(text):
    assert triage_text(text).exit_code == 0


def test_what_follows_a_logging_error_is_read():
    text = (
        f"--- Logging error ---\n{BELOW}TypeError: no\nCall stack:\n"
        "  File \"/opt/a.py\", line 30, in <module>\n    main()\nMessage: 'x'\nArguments: (1,)\n"
    )
    (group,) = triage_text(text + BELOW + "KeyError: 1\n").failures
    assert group.event.type == "KeyError" and len(group.event.frames) == 1


def test_a_warning_with_its_traceback_at_the_end_is_a_failure():
    prefix = "W0401 07:11:00.000000 40 torch/_dynamo/convert_frame.py:1233] [0/0] "
    text = "".join(prefix + line + "\n" for line in f"{BELOW}ValueError: no".split("\n"))
    assert triage_text(text).exit_code == 1 and triage_text(text + "step 2\n").exit_code == 0


def test_a_traceback_in_the_repr_of_an_exception_is_read():
    (group,) = triage_text(f"10:00:00 ERROR pool: RemoteError('{QUOTED}')\nstep 2\n").failures
    assert (group.event.type, group.event.message) == ("KeyError", "1")
    assert [frame.line for frame in group.event.frames] == [3]


def test_a_traceback_that_was_dealt_with_does_not_excuse_the_next_one():
    text = (
        f"WARNING fetch failed, retrying\n{BELOW}ConnectionError: x\n{BELOW}KeyError: 1\nstep 2\n"
    )
    diagnosis = triage_text(text)
    assert [g.event.type for g in diagnosis.failures] == ["KeyError"]
    assert [g.event.type for g in diagnosis.handled] == ["ConnectionError"]
