"""The pytest plugin: ``race_*`` fixtures, the ``race`` mark, ``--race-*`` options.

Installed through the ``pytest11`` entry point as ``race``; ``-p no:race`` switches it off. It
imports no torch: collection of a project that has nothing to do with torch stays cheap.

Precedence of a deadline: ini ``race_deadline`` < ``--race-deadline`` < ``@pytest.mark.race(...)``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from harness import cause, crash, replay_option
from harness.baseline import Baseline, BaselineError
from harness.capture import CapturedError, capture_error
from harness.crew import Crew
from harness.isolate import PRELOAD, CaseResult, Isolation
from harness.report import ci, files, html, table
from harness.report.row import Row, make_row
from harness.verdict import Expectation

if TYPE_CHECKING:
    from harness.watch import Watch

BAD_INPUT = 2
_rows = pytest.StashKey[list[Row]]()
_baseline = pytest.StashKey[Baseline]()
_item_rows = pytest.StashKey[list[Row]]()


# -- options and configuration -------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("race", "compile races in threads (harness)")
    group.addoption(
        "--race-repeat",
        metavar="N",
        type=int,
        default=1,
        help="run each test marked 'race' N times and report the rate per case",
    )
    group.addoption(
        "--race-deadline",
        metavar="SECONDS",
        type=float,
        default=None,
        help="seconds for one isolated case (default: ini race_deadline, 120)",
    )
    group.addoption(
        "--race-device",
        metavar="DEVICE",
        default="cpu",
        help="device for cases that take one: cpu, cuda (all GPUs in turn) or cuda:N",
    )
    group.addoption(
        "--race-report",
        metavar="FOLDER",
        default=None,
        help="write index.html, report.json and the files of each case into FOLDER",
    )
    group.addoption(
        "--race-baseline",
        metavar="FILE",
        default=None,
        help="known findings (TOML); see harness.baseline",
    )
    group.addoption(
        "--race-keep",
        metavar="FOLDER",
        default=None,
        help="keep each case's own folder (output, stack dump, caches) in FOLDER",
    )
    replay_option.add(group)
    parser.addini("race_deadline", "seconds for one isolated case", default="120")
    parser.addini("race_preload", "modules that the fork server imports", "linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "race(deadline=SECONDS): a test of a compile race; repeated by --race-repeat",
    )
    config.stash[_rows] = []
    config.stash[_baseline] = Baseline()
    replay_option.configure(config)
    if hasattr(config, "workerinput"):  # the controller has checked all this
        _load_baseline(config)
        return
    repeat, deadline = config.option.race_repeat, config.option.race_deadline
    if repeat < 1:
        pytest.exit(f"--race-repeat must be at least 1, not {repeat}", BAD_INPUT)
    if deadline is not None and not deadline > 0:
        pytest.exit(f"--race-deadline must be positive, not {deadline:g}", BAD_INPUT)
    if not _is_positive(ini := config.getini("race_deadline")):
        pytest.exit(f"ini race_deadline must be positive seconds, not {ini!r}", BAD_INPUT)
    if why := _no_such_device(config.option.race_device):
        pytest.exit(why, BAD_INPUT)
    _load_baseline(config)
    if config.option.race_report is not None:
        folder = Path(config.option.race_report)
        if files.is_foreign(folder):
            pytest.exit(f"--race-report {folder} holds other files; name a new folder", BAD_INPUT)
        try:
            files.clear(folder)
        except OSError as error:
            pytest.exit(f"--race-report {folder} cannot be used: {error}", BAD_INPUT)


def _load_baseline(config: pytest.Config) -> None:
    if config.option.race_baseline is None:
        return
    try:
        config.stash[_baseline] = Baseline.load(Path(config.option.race_baseline))
    except BaselineError as error:
        pytest.exit(f"--race-baseline: {error}", BAD_INPUT)


def _no_such_device(device: str) -> str | None:
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind != "cuda" or (":" in device and not index.isdigit()):
        return f"--race-device: {device!r} is not a device; use cpu, cuda or cuda:N"
    # Asked in another process: this one shall neither import torch nor touch a GPU.
    count = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=False,
    )
    available = int(count.stdout.strip() or 0) if count.returncode == 0 else 0
    if int(index or 0) >= available:
        return f"--race-device: there is no {device} here, torch sees {available} GPUs"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for wrong in filter(None, map(_wrong_mark, items)):
        pytest.exit(wrong, BAD_INPUT)
    replay_option.select(config, items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    repeat = metafunc.config.option.race_repeat
    if repeat > 1 and metafunc.definition.get_closest_marker("race") is not None:
        metafunc.fixturenames.append(replay_option.REPETITION)
        metafunc.parametrize(replay_option.REPETITION, range(repeat), ids=lambda n: f"run{n}")


# -- fixtures ------------------------------------------------------------------------------------


@pytest.fixture
def _race_repetition() -> int:
    return 0


@pytest.fixture
def race_device(request: pytest.FixtureRequest) -> str:
    """The device named by ``--race-device``."""
    return str(request.config.option.race_device)


@pytest.fixture(scope="session")
def race_isolation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Isolation]:
    """The fork server of this test process (one per xdist worker), with its own cache folders."""
    keep = request.config.option.race_keep
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    folder = Path(keep) / worker if keep else tmp_path_factory.mktemp("race")
    preload = (*PRELOAD, *request.config.getini("race_preload"))
    with Isolation(preload=preload, folder=folder, keep=keep is not None) as isolation:
        yield isolation


RunIsolated = Callable[..., CaseResult]


@pytest.fixture
def race_isolated(request: pytest.FixtureRequest, race_isolation: Isolation) -> RunIsolated:
    """``race_isolated(function, **arguments)``: runs it in a fresh process with fresh caches."""
    deadline = _deadline(request)

    def run(function: Callable[..., Any], /, **arguments: Any) -> CaseResult:
        return race_isolation.run(
            function,
            arguments,
            deadline=deadline,
            label=request.node.name,
            environment=replay_option.environment(request.node),
        )

    return run


@pytest.fixture
def race_trial(request: pytest.FixtureRequest, race_isolated: RunIsolated) -> Callable[..., Row]:
    """Runs a case isolated, judges its record, puts it into the table, fails if it is not met.

    ``race_trial(case_function, expect=Expectation(...), kind="guarded", **arguments)``; the
    function returns a trial's record (:class:`harness.trial.Trial`).
    """
    config = request.config
    rows = request.node.stash.setdefault(_item_rows, [])

    def run(
        function: Callable[..., Any],
        /,
        *,
        expect: Expectation,
        kind: str = "guarded",
        **arguments: Any,
    ) -> Row:
        result = race_isolated(function, **arguments)
        record = result.record()
        row = make_row(
            _case_name(request.node),
            kind,
            record,
            expect,
            test=_place(request.node, sys._getframe(1)),
            replay=_replay(request.node),
        )
        row = _excuse(row, config.stash[_baseline])
        if not row.met and (path := replay_option.save(request.node, function, arguments, record)):
            path = os.path.relpath(path, config.rootpath)  # as the test's own name
            row = replace(row, replay=f"{row.replay} {shlex.quote(f'--race-replay={path}')}")
        if (folder := replay_option.report_folder(config)) is not None:
            row = files.write_case(folder, request.node.name, record, row)
            if not row.met:
                crash_folder = files.crash_folder(folder, row)
                why = crash.write_case(crash_folder, record, dump=result.dump)
                told = why or f"harness explain {shlex.quote(_from_start(config, crash_folder))}"
                request.node.add_report_section("call", "race case: crash folder", told)
        rows.append(row)
        request.node.user_properties.extend(ci.properties(row))
        if not row.met:
            _fail(request.node, row, result)
        return row

    return run


@pytest.fixture
def race_crew() -> Iterator[Callable[..., Crew]]:
    """``race_crew(3, start="staggered", deadline=30)``: a crew of threads in this process.

    At the end of the test no thread of it may be alive.
    """
    before = set(threading.enumerate())
    crews: list[Crew] = []

    def make(size: int, **options: Any) -> Crew:
        crews.append(Crew(size, **options))
        return crews[-1]

    yield make
    names = {member.name for crew in crews for member in crew.members}
    alive = [t.name for t in threading.enumerate() if t not in before and t.name in names]
    if alive:
        pytest.fail(
            f"threads of the crew are still alive: {', '.join(sorted(alive))}", pytrace=False
        )


@pytest.fixture
def race_fx_state() -> Iterator[Watch]:
    """Checks of the FX and compile state, injected at every entry into a compiled function.

    Yields the watch; at the end of the test every probe must be at rest.
    """
    from harness import probes
    from harness.hooks import Hooks
    from harness.watch import Watch

    watch = Watch()
    with Hooks(watch.on_event), watch:
        yield watch
    left = [row for row in probes.audit(watch.rest) if row["at_rest"] is False]
    if left:
        lines = [f"{row['probe']} is {row['value']}, at rest {row['rest']}" for row in left]
        pytest.fail("compile state is not at rest: " + "; ".join(lines), pytrace=False)


class Tracebacks:
    """Exceptions of threads as data; ``errors`` maps a thread's name to what killed it."""

    def __init__(self) -> None:
        self.errors: dict[str, CapturedError] = {}

    def capture(self, error: BaseException) -> CapturedError:
        """The same for an exception that was caught."""
        captured = self.errors[threading.current_thread().name] = capture_error(error)
        return captured


@pytest.fixture
def race_tracebacks(request: pytest.FixtureRequest) -> Iterator[Tracebacks]:
    """Captures eval_frame, convert_frame and FX frames of every thread that dies in the test.

    Unlike pytest's own handling, which turns a dead thread into a warning, the test fails with
    all of them unless it has looked at ``errors`` and emptied it.
    """
    found = Tracebacks()
    previous = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and arguments.thread is not None:
            found.errors[arguments.thread.name] = capture_error(arguments.exc_value)

    threading.excepthook = hook
    try:
        yield found
    finally:
        threading.excepthook = previous
    if found.errors:
        for name, error in found.errors.items():
            request.node.add_report_section("teardown", f"race: {name}", error.text)
        told = [f"{name} died by {error.type}" for name, error in found.errors.items()]
        pytest.fail("; ".join(told), pytrace=False)


def _deadline(request: pytest.FixtureRequest) -> float:
    mark = request.node.get_closest_marker("race")
    if mark is not None and "deadline" in mark.kwargs:
        return float(mark.kwargs["deadline"])
    given = request.config.option.race_deadline
    return float(given if given is not None else request.config.getini("race_deadline"))


def _wrong_mark(item: pytest.Item) -> str | None:
    for mark in item.iter_markers("race"):
        if mark.args or mark.kwargs.keys() - {"deadline"}:
            return f"{item.nodeid}: the mark 'race' takes deadline=SECONDS and nothing else"
        deadline = mark.kwargs.get("deadline", 1)
        if not isinstance(deadline, int | float) or not deadline > 0:
            return f"{item.nodeid}: the mark's deadline must be positive, not {deadline!r}"
    return None


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _from_start(config: pytest.Config, path: Path) -> str:
    """``path`` as a shell in pytest's own folder would name it."""
    return os.path.relpath(path, config.invocation_params.dir)


def _place(item: pytest.Item, frame: FrameType) -> str:
    """``FILE:LINE`` of the running test's own line: helpers in between are passed over."""
    at: FrameType | None = frame
    code = getattr(getattr(item, "function", None), "__code__", None)
    while at is not None and at.f_code is not code:
        at = at.f_back
    file, line, _ = item.location
    return f"{file}:{at.f_lineno if at is not None else (line or 0) + 1}"


def _replay(item: pytest.Item) -> str:
    """The command that runs this one test again, from pytest's root."""
    words = ["python", "-m", "pytest", item.nodeid]
    if item.config.option.race_device != "cpu":
        words.append(f"--race-device={item.config.option.race_device}")
    if item.config.option.race_repeat > 1:  # the repetition is part of the test's name
        words.append(f"--race-repeat={item.config.option.race_repeat}")
    return shlex.join(words)


def _case_name(item: pytest.Item) -> str:
    """``guard[serial-together]`` for the fourth run of ``test_guard[serial-together]``."""
    return replay_option.without_repetition(item, item.name).removeprefix("test_")


def _excuse(row: Row, baseline: Baseline) -> Row:
    entry = None if row.met else baseline.find(row.case, row.verdict)
    if entry is None:
        return row
    data = row.as_dict()
    if entry.expired(date.today()):
        data["unmet"] = (*row.unmet, f"its entry in the baseline expired on {entry.expires}")
    else:
        data["known"] = f"{entry.owner}, {entry.report}"
    return Row.from_dict(data)


def _fail(item: pytest.Item, row: Row, result: CaseResult) -> None:
    for title, text in (
        ("cause", "\n".join(cause.lines(result.record()))),
        ("traceback", result.error),
        ("stacks", result.dump),
        ("output", result.output),
    ):
        if text:
            item.add_report_section("call", f"race case: {title}", text)
    if row.known:
        pytest.xfail(f"known finding ({row.known}): {'; '.join(row.unmet)}")
    lines = (f"{row.case} is not what it had to be", *row.unmet, f"replay: {row.replay}")
    pytest.fail("\n".join(lines), pytrace=False)


# -- reporting -----------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    replay_option.check(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and (rows := item.stash.get(_item_rows, None)):
        report.race_rows = [row.as_dict() for row in rows]  # crosses from an xdist worker
    return report


class _Collector:
    """Lives in the process that reports: the controller under xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._trouble = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows: list[Mapping[str, Any]] = getattr(report, "race_rows", [])
        self.config.stash[_rows].extend(Row.from_dict(row) for row in rows)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        rows, folder = self.config.stash[_rows], replay_option.report_folder(self.config)
        if rows and folder is not None:
            facts = {
                "device": self.config.option.race_device,
                "repeat": self.config.option.race_repeat,
                "exit": int(exitstatus),
                "met": sum(row.met for row in rows),
                "gone": [entry.case for entry in self._gone()],
                "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            }
            files.write_report(folder, rows, facts)
            html.write_index(folder)
        try:
            ci.write_summary(rows)
        except OSError as error:  # the tests have their results all the same
            self._trouble = f"the step summary cannot be written: {error}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = self.config.stash[_rows]
        if not rows:
            return
        writer = terminalreporter
        writer.section("compile races")
        width = max(72, writer._tw.fullwidth) if writer.isatty else table.WIDE
        writer.write(table.render(rows, width=width, color=writer.hasmarkup))
        writer.line("")
        for line in table.summary(rows):
            writer.line(line)
        for entry in self._gone():
            writer.line(
                f"gone: {entry.case} no longer shows '{entry.verdict}'; take it out of the baseline"
            )
        if self.config.option.race_report is not None:
            writer.line(f"report: {Path(self.config.option.race_report) / 'index.html'}")
        for line in ci.workflow_commands(rows, root=self.config.rootpath):
            writer.line(line)
        if self._trouble:
            writer.line(self._trouble, red=True)

    def _gone(self) -> list[Any]:
        rows = self.config.stash[_rows]
        shown = [(row.case, row.verdict) for row in rows if not row.met]
        return self.config.stash[_baseline].gone(shown, [row.case for row in rows])


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Collector(session.config), "race-collector")
