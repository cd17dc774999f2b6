"""Whatever happens in a case becomes data: each way to end, nothing shared, nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import inspect
import itertools
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

from harness import isolate
from harness.isolate import Isolation, IsolationError

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

# -- the cases -----------------------------------------------------------------------------------


def add(*, a: float, b: float) -> float:
    return a + b


def raises() -> None:
    raise LookupError("first line\nsecond line")


def exits_by_exception() -> None:
    sys.exit(3)


def exits_by_force() -> None:
    os._exit(7)


def exits_by_force_as_if_well() -> None:
    os._exit(0)


def segfaults() -> None:
    print("last words")
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_in_a_lock() -> None:
    print("last words")
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the hanging line


def hangs_with_the_gil() -> None:
    ctypes.PyDLL(None).pause()  # the hanging line


def hangs_in_a_thread() -> None:
    def parked() -> None:
        threading.Event().wait()  # the hanging line

    thread = threading.Thread(target=parked, name="parked")
    thread.start()
    thread.join()


def leaves_a_thread_behind() -> str:
    threading.Thread(target=threading.Event().wait).start()
    return "returned all the same"


def hangs_without_watchdog() -> None:
    faulthandler.cancel_dump_traceback_later()
    threading.Event().wait()


def unplain_value() -> object:
    return {"lock": threading.Lock()}


def prints(*, text: str) -> None:
    print(text)
    print(text.upper(), file=sys.stderr)
    os.system("echo from a child")


def cache_folders() -> dict[str, str]:
    folders = {name: os.environ[name] for name in CACHES}
    for folder in folders.values():
        os.makedirs(folder)
    return folders


def inductor_cache_folder() -> list[str]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return [cache_dir(), os.environ["TORCHINDUCTOR_CACHE_DIR"]]


def dirty_the_state() -> list[object]:
    import json as module

    before = [
        os.environ.get("RACE_TEST_DIRT"),
        getattr(module, "race_test_dirt", None),
        os.getcwd(),
    ]
    os.environ["RACE_TEST_DIRT"] = "1"
    module.race_test_dirt = 1  # type: ignore[attr-defined]
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return before


def look(*, variable: str) -> dict[str, Any]:
    return {
        "variable": os.environ.get(variable),
        "pid": os.getpid(),
        "server": os.getppid(),
        "threads": threading.active_count(),
        "stdin": sys.stdin.read(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGALRM, signal.SIGCHLD)],
    }


def interval() -> list[float]:
    begun = time.monotonic()
    threading.Event().wait(0.05)
    return [begun, time.monotonic()]


def child_that_stays(*, file: str | None = None) -> int:
    child = subprocess.Popen(["sleep", "600"])
    if file is not None:
        write_whole(Path(file), [os.getpid(), child.pid])
        threading.Event().wait()
    return child.pid


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@nothing()
def decorated() -> str:
    return "its wrapper's code is in contextlib"


# -- helpers -------------------------------------------------------------------------------------


def write_whole(path: Path, data: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data))
    part.rename(path)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    pause, end = threading.Event(), time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.02)
    return value


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def line_of(function: Callable[..., Any], words: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if words in line)


@pytest.fixture(scope="module")
def light() -> Iterator[Isolation]:
    """A server without torch: what is tested here is the machinery, and it starts at once."""
    preload, buffered = ("json", "pytest", "psutil"), {"PYTHONUNBUFFERED": ""}
    with Isolation(preload=preload, environment=buffered) as opened:
        yield opened


def module(folder: Path, name: str, text: str) -> dict[str, str]:
    """Writes an importable module; returns the environment that finds it."""
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


# -- how a case ends -----------------------------------------------------------------------------


def test_a_value_comes_back(light: Isolation) -> None:
    result = light.run(add, {"a": 1, "b": 2.5}, deadline=20)
    assert (result.ended, result.value, result.error, result.dump) == ("returned", 3.5, "", "")


@pytest.mark.parametrize(
    ("case", "ended", "what"),
    [
        (raises, "raised", "LookupError: first line"),
        (exits_by_exception, "raised", "SystemExit: 3"),
        (unplain_value, "raised", "TypeError: Object of type lock is not JSON serializable"),
        (exits_by_force, "exit", "ended by exit code 7 without a result"),
        (exits_by_force_as_if_well, "exit", "ended by exit code 0 without a result"),
        (segfaults, "signal", "died by SIGSEGV"),
        (killed, "signal", "died by SIGKILL"),
    ],
)
def test_each_end_has_its_word_and_one_line(
    light: Isolation, case: Callable[..., Any], ended: str, what: str
) -> None:
    result = light.run(case, deadline=20)
    assert (result.ended, result.what) == (ended, what)
    assert result.value is None
    record = result.record()
    assert record["process"]["ended"] == ended and record["process"]["what"] == what
    assert light.run(add, {"a": 1, "b": 1}, deadline=20).value == 2, "the next case is well"


def test_what_was_raised_comes_back_with_its_traceback(light: Isolation) -> None:
    error = light.run(raises, deadline=20).error
    assert "second line" in error and f"line {line_of(raises, 'raise ')}, in raises" in error


def test_a_native_crash_has_a_dump_and_its_last_words(light: Isolation) -> None:
    result = light.run(segfaults, deadline=20)
    assert "Fatal Python error: Segmentation fault" in result.dump
    assert "in segfaults" in result.dump
    assert result.output == "last words\n"


@pytest.mark.parametrize(
    ("case", "frame"),
    [
        (hangs_in_a_lock, "hangs_in_a_lock"),
        (hangs_with_the_gil, "hangs_with_the_gil"),
        (hangs_in_a_thread, "parked"),
    ],
)
def test_a_hang_is_ended_at_its_deadline_and_the_dump_names_the_line(
    light: Isolation, case: Callable[..., Any], frame: str
) -> None:
    """Where the GIL is held no Python timer fires, pytest-timeout's thread method included."""
    result = light.run(case, deadline=3)
    assert (result.ended, result.what) == ("hang", "had not ended after its deadline of 3 s")
    assert 3 <= result.seconds < 30
    assert f"line {line_of(case, 'the hanging line')} in {frame}" in result.dump


def test_what_a_hanging_case_printed_is_kept(light: Isolation) -> None:
    assert light.run(hangs_in_a_lock, deadline=3).output == "last words\n"


def test_a_case_that_lost_its_watchdog_is_killed_by_the_supervisor(
    light: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest and others re-arm faulthandler's only timer."""
    monkeypatch.setattr(isolate, "_GRACE", 0.5)
    result = light.run(hangs_without_watchdog, deadline=3)
    assert result.ended == "hang" and "killed: still there 0.5 s after" in result.what
    assert light.run(add, {"a": 1, "b": 1}, deadline=20).value == 2


def test_a_thread_that_still_runs_does_not_keep_a_case_that_has_returned(light: Isolation) -> None:
    assert light.run(leaves_a_thread_behind, deadline=20).value == "returned all the same"


# -- a fresh process per case ---------------------------------------------------------------------


def test_output_of_a_case_and_of_its_children_is_captured(
    light: Isolation, capfd: pytest.CaptureFixture[str]
) -> None:
    result = light.run(prints, {"text": "hello"}, deadline=20)
    assert sorted(result.output.splitlines()) == ["HELLO", "from a child", "hello"]
    assert capfd.readouterr() == ("", "")


def test_each_case_has_its_own_empty_compile_caches(light: Isolation) -> None:
    """lance#9055, torch-xpu-ops#5365: one shared folder gave errors, and once wrong results."""
    first = light.run(cache_folders, deadline=20).value
    second = light.run(cache_folders, deadline=20).value
    assert len({*first.values(), *second.values()}) == 4
    assert not any(Path(folder).exists() for folder in first.values()), "removed with the case"
    assert {Path(folder).name for folder in first.values()} == {"inductor", "triton"}


def test_torch_itself_uses_the_cases_cache_folder(isolation: Isolation) -> None:
    used, told = isolation.run(inductor_cache_folder, deadline=60).value
    assert used == told


def test_the_state_of_one_case_does_not_reach_the_next(light: Isolation) -> None:
    assert light.run(dirty_the_state, deadline=20).value == [None, None, os.getcwd()]
    assert light.run(dirty_the_state, deadline=20).value == [None, None, os.getcwd()]
    assert "RACE_TEST_DIRT" not in os.environ and not hasattr(json, "race_test_dirt")


def test_a_case_is_an_ordinary_process_with_one_thread(light: Isolation) -> None:
    one, two = (light.run(look, {"variable": "HOME"}, deadline=20).value for _ in range(2))
    assert one["pid"] != two["pid"] and one["server"] == two["server"] == light.server_pid
    assert one["threads"] == 1 and one["stdin"] == ""
    assert set(one["signals"]) == {str(signal.SIG_DFL)}


def test_extra_variables_reach_the_case() -> None:
    with Isolation(preload=("json", "pytest"), environment={"RACE_TEST_EXTRA": "yes"}) as opened:
        result = opened.run(look, {"variable": "RACE_TEST_EXTRA"}, deadline=20)
    assert result.value["variable"] == "yes"


def test_a_case_starts_in_a_fraction_of_a_second_once_the_server_stands() -> None:
    begun = time.monotonic()
    with Isolation(preload=("torch", "pytest")) as opened:
        opened.run(add, {"a": 1, "b": 1}, deadline=60)
        server = time.monotonic() - begun
        starts = [opened.run(add, {"a": 1, "b": 1}, deadline=60).start_seconds for _ in range(3)]
    assert 0 < min(starts) < server / 3


# -- what cannot be run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1,
        functools.partial(add, a=1),
        len,
        Path("x").exists,
    ],
)
def test_a_function_without_an_address_is_refused(
    light: Isolation, function: Callable[..., Any]
) -> None:
    with pytest.raises(IsolationError, match="define it at the top level of a file"):
        light.run(function)


def test_a_nested_function_is_refused(light: Isolation) -> None:
    def nested() -> None: ...

    with pytest.raises(IsolationError, match="define it at the top level of a file"):
        light.run(nested)


def test_a_decorated_function_is_looked_up_where_it_stands(light: Isolation) -> None:
    assert light.run(decorated, deadline=20).value == "its wrapper's code is in contextlib"


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_deadline_that_cannot_be_is_refused(light: Isolation, deadline: float) -> None:
    with pytest.raises(IsolationError, match="deadline must be positive and finite"):
        light.run(add, deadline=deadline)


def test_arguments_that_cannot_be_sent_are_refused_and_cost_no_server(light: Isolation) -> None:
    light.run(add, {"a": 1, "b": 1}, deadline=20)
    server = light.server_pid
    with pytest.raises(IsolationError, match="add's arguments must be plain data"):
        light.run(add, {"a": object(), "b": 1})
    assert light.server_pid == server
    assert light.run(add, {"a": 1, "b": 1}, deadline=20).value == 2


def test_a_preload_that_starts_a_thread_is_refused_in_one_line(tmp_path: Path) -> None:
    """A process that forks must have one thread, or the fork inherits locks that nobody frees."""
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    environment = module(tmp_path, "starts_a_thread", text)
    with Isolation(preload=("starts_a_thread",), environment=environment) as opened:
        with pytest.raises(IsolationError) as caught:
            opened.run(add, {"a": 1, "b": 1})
        assert opened.server_pid is None
    assert str(caught.value) == (
        "the fork server cannot start: the preloaded modules started 1 threads"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise OSError('no disk')", "cannot import bad_preload: OSError: no disk"),
        ("raise SystemExit(3)", "cannot import bad_preload: SystemExit: 3"),
        ("import os; os._exit(3)", "it ended before it was ready"),
    ],
)
def test_a_preload_that_fails_is_named(tmp_path: Path, text: str, why: str) -> None:
    environment = module(tmp_path, "bad_preload", text)
    with Isolation(preload=("json", "bad_preload"), environment=environment) as opened:
        with pytest.raises(IsolationError) as caught:
            opened.run(add, {"a": 1, "b": 1})
    assert str(caught.value) == f"the fork server cannot start: {why}"


def test_what_a_preload_prints_is_no_output_of_the_cases(tmp_path: Path) -> None:
    environment = module(tmp_path, "talks", "print('hello from the import')")
    environment["PYTHONUNBUFFERED"] = ""
    with Isolation(preload=("talks", "pytest"), environment=environment) as opened:
        outputs = [opened.run(prints, {"text": "x"}, deadline=20).output for _ in range(2)]
    assert not any("hello from the import" in output for output in outputs)


# -- server, folder, children ---------------------------------------------------------------------


def test_a_server_that_dies_between_two_cases_is_replaced() -> None:
    with Isolation(preload=("json", "pytest")) as opened:
        opened.run(add, {"a": 1, "b": 1}, deadline=20)
        first = opened.server_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: is_gone(first))
        assert opened.run(add, {"a": 1, "b": 1}, deadline=20).value == 2
        assert opened.server_pid != first


def test_a_server_that_dies_during_a_case_is_reported_and_takes_everybody_along(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pids"
    with Isolation(preload=("json", "pytest")) as opened:

        def kill_the_server() -> None:
            until(file.exists)
            os.kill(opened.server_pid or 0, signal.SIGKILL)

        killer = threading.Thread(target=kill_the_server)
        killer.start()
        with pytest.raises(IsolationError, match="the fork server died during child_that_stays"):
            opened.run(child_that_stays, {"file": str(file)}, deadline=60)
        killer.join()
        for pid in json.loads(file.read_text()):
            until(lambda pid=pid: is_gone(pid))
        assert opened.run(add, {"a": 1, "b": 1}, deadline=20).value == 2


@pytest.mark.parametrize("when", ["the server starts", "the case runs"])
def test_an_interrupted_run_leaves_an_isolation_that_works(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """pytest-timeout's signal method raises wherever the main thread is."""
    receive = isolate._Channel.receive
    calls = {"the server starts": 1, "the case runs": 3}

    def interrupted(channel: Any, seconds: float) -> Any:
        calls[when] -= 1
        if calls[when] == 0:
            raise KeyboardInterrupt
        return receive(channel, seconds)

    monkeypatch.setattr(isolate._Channel, "receive", interrupted)
    with Isolation(preload=("json", "pytest")) as opened:
        with pytest.raises(KeyboardInterrupt):
            opened.run(interval, deadline=20)
        assert opened.run(add, {"a": 1, "b": 1}, deadline=20).value == 2


def test_what_a_case_started_ends_with_it(light: Isolation) -> None:
    child = light.run(child_that_stays, deadline=20).value
    until(lambda: is_gone(child))


def test_closing_ends_the_server_and_removes_the_folder() -> None:
    with Isolation(preload=("json", "pytest")) as opened:
        folder = Path(opened.run(cache_folders, deadline=20).value[CACHES[0]]).parents[1]
        server = opened.server_pid
        assert folder.is_dir() and server is not None and not is_gone(server)
    assert not folder.exists()
    assert is_gone(server) and opened.server_pid is None


def test_kept_folders_hold_output_dump_and_caches(tmp_path: Path) -> None:
    with Isolation(preload=("json", "pytest"), folder=tmp_path, keep=True) as opened:
        kept = [
            opened.run(prints, {"text": "x"}, deadline=20, label="a case/with a name").folder,
            opened.run(cache_folders, deadline=20).folder,
        ]
    assert [Path(folder or "").name for folder in kept] == [
        "001-a_case_with_a_name",
        "002-cache_folders",
    ]
    assert "x" in Path(kept[0] or "", "output.log").read_text()
    assert Path(kept[1] or "", "inductor").is_dir()


def test_what_an_earlier_run_has_kept_is_no_answer_and_no_cache(tmp_path: Path) -> None:
    """The same folder given again: a case that dies without a word must not answer from there."""
    for case, ended in ((cache_folders, "returned"), (exits_by_force_as_if_well, "exit")):
        with Isolation(preload=("json", "pytest"), folder=tmp_path, keep=True) as opened:
            result = opened.run(case, deadline=20, label="same")
        assert (result.ended, bool(result.value)) == (ended, ended == "returned")
    first, second = sorted(tmp_path.iterdir())
    assert (first / "answer.json").exists() and not (second / "answer.json").exists()
    assert (first / "inductor").is_dir() and not (second / "inductor").exists()


def test_two_threads_take_turns(light: Isolation) -> None:
    spans: list[list[float]] = []

    def several() -> None:
        for _ in range(3):
            spans.append(light.run(interval, deadline=20).value)

    threads = [threading.Thread(target=several) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    spans.sort()
    assert len(spans) == 6
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))


# -- a case is run as its parent is now ------------------------------------------------------------


def where_am_i():
    return {"variable": os.environ.get("RACE_TEST_VARIABLE"), "folder": os.getcwd()}


def test_environment_and_working_folder_are_those_of_the_request(isolation, monkeypatch, tmp_path):
    """The server started earlier; what a test sets afterwards still reaches its case."""
    monkeypatch.setenv("RACE_TEST_VARIABLE", "here")
    monkeypatch.chdir(tmp_path)
    assert isolation.run(where_am_i).value == {"variable": "here", "folder": str(tmp_path)}
    monkeypatch.delenv("RACE_TEST_VARIABLE")
    assert isolation.run(where_am_i).value["variable"] is None
