"""Tracebacks as data: the role of a frame is its position, never its name."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from harness.capture import PASSED, RAISED, Frame, capture_error, shorten, stack_of


def compile_wrapper(depth: int, fail_at: int) -> None:
    """Called as torch's own wrapper is; raises itself, or passes on to what raises."""
    if depth == fail_at:
        raise RuntimeError("Detected that you are using FX\nto symbolically trace")
    inner(depth + 1, fail_at)


def inner(depth: int, fail_at: int) -> None:
    if depth == fail_at:
        raise RuntimeError("not the wrapper's own")
    compile_wrapper(depth + 1, fail_at)


class Falsy(Exception):
    def __bool__(self) -> bool:
        return False


def catch(*args: int) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        compile_wrapper(*args)
    return caught.value


@pytest.mark.parametrize(("fail_at", "raising"), [(0, "compile_wrapper"), (3, "inner")])
def test_the_same_function_raised_or_was_passed_through(fail_at: int, raising: str) -> None:
    """A traceback of pytorch#126024 shows compile_wrapper in both cases."""
    error = capture_error(catch(0, fail_at))
    ours = [frame for frame in error.frames if frame.function in ("compile_wrapper", "inner")]
    assert [frame.role for frame in ours] == [PASSED] * fail_at + [RAISED]
    assert "compile_wrapper" in {frame.function for frame in ours}
    assert error.raising is ours[-1] and error.raising.function == raising
    assert error.raising.source.startswith("raise RuntimeError(")


def test_exactly_one_frame_of_a_recursive_function_raised() -> None:
    frames = capture_error(catch(0, 4)).frames
    assert [frame.role for frame in frames].count(RAISED) == 1
    assert [f.function for f in frames if f.role == PASSED].count("compile_wrapper") == 2


def test_the_chain_of_causes_is_kept_nearest_first_with_its_own_frames() -> None:
    def backend() -> None:
        raise KeyError("custom")

    def wrapped() -> None:
        try:
            backend()
        except KeyError as cause:
            raise ValueError("the AOT stage's words") from cause

    try:
        try:
            wrapped()
        except ValueError:
            raise TypeError("dynamo's last word")  # noqa: B904 (a context, not a cause)
    except TypeError as error:
        captured = capture_error(error)
    assert [captured.type, *(cause.type for cause in captured.causes)] == [
        "TypeError",
        "ValueError",
        "KeyError",
    ]
    assert [cause.raising.function for cause in captured.causes if cause.raising] == [
        "wrapped",
        "backend",
    ]
    assert captured.causes[1].message == "'custom'"


def test_from_none_hides_the_first_cause_from_people_not_from_the_record() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("last") from None
    except ValueError as error:
        captured = capture_error(error)
    assert "KeyError" not in captured.text
    assert [cause.type for cause in captured.causes] == ["KeyError"]


def test_an_exception_that_counts_as_false_is_a_cause_all_the_same() -> None:
    error = ValueError("last")
    error.__cause__ = Falsy("first")
    assert [cause.message for cause in capture_error(error).causes] == ["first"]


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert [cause.message for cause in capture_error(one).causes] == ["two"]


def test_an_exception_that_was_never_raised_has_no_raising_frame() -> None:
    assert capture_error(ValueError("made by hand")).raising is None


def test_names_are_qualified_except_for_builtins() -> None:
    assert capture_error(ValueError()).type == "ValueError"
    assert capture_error(Falsy()).type == f"{__name__}.Falsy"


def test_a_captured_error_is_plain_data() -> None:
    data = capture_error(catch(0, 0)).as_dict()
    assert json.loads(json.dumps(data))["frames"][-1]["role"] == RAISED


@pytest.mark.parametrize(
    ("file", "short"),
    [
        (
            "/v/lib/python3.11/site-packages/torch/_dynamo/eval_frame.py",
            "torch/_dynamo/eval_frame.py",
        ),
        ("/usr/lib/dist-packages/torch/fx/traceback.py", "torch/fx/traceback.py"),
        ("/a/site-packages/b/site-packages/torch/x.py", "torch/x.py"),
        ("/home/me/project/race/program.py", "project/race/program.py"),
        ("/x.py", "x.py"),
        ("<string>", "<string>"),
    ],
)
def test_paths_are_shown_from_the_package_on(file: str, short: str) -> None:
    assert shorten(file) == short


def frames_of(file: str) -> tuple[Frame, ...]:
    scope: dict = {}
    exec(compile("def fail():\n    raise ValueError", file, "exec"), scope)
    try:
        scope["fail"]()
    except ValueError as error:
        return capture_error(error).central_frames()
    raise AssertionError


@pytest.mark.parametrize("root", ["/v/site-packages/", "/home/me/pytorch/", ""])
def test_a_central_frame_is_one_wherever_torch_lies(root: str) -> None:
    for file in ("torch/_dynamo/eval_frame.py", "torch/fx/experimental/proxy_tensor.py"):
        assert [frame.role for frame in frames_of(root + file)] == [RAISED]


@pytest.mark.parametrize("file", ["mytorch/_dynamo/eval_frame.py", "/a/eval_frame.py", "x.py"])
def test_a_file_that_only_looks_like_torchs_is_not_central(file: str) -> None:
    assert frames_of(file) == ()


def test_the_stack_of_a_live_thread_ends_where_the_thread_is() -> None:
    here, go_on = threading.Event(), threading.Event()

    def parked() -> None:
        here.set()
        go_on.wait(20)

    thread = threading.Thread(target=parked)
    thread.start()
    assert here.wait(10)
    frames = stack_of(sys._current_frames()[thread.ident or 0])
    go_on.set()
    thread.join()
    names = [frame.function for frame in frames]
    assert names[0] == "_bootstrap" and "parked" in names
    assert {frame.role for frame in frames} == {PASSED}
