"""Runs somebody's own program, unedited, and watches its threads compile: ``harness run -- ...``.

The command starts the program with one folder more on ``PYTHONPATH`` and one environment variable
more. Every Python interpreter that the program starts then loads :mod:`harness.inject` by itself.
Standard streams, working folder, arguments and signals are the program's; its exit code is ours,
except that a program that ends well although something was found ends with 1.

Not covered: interpreters started with ``-I``, ``-E`` or ``-S`` or with a new environment, and
programs that end by ``os._exit`` (what was found before that is told; the state at the end is not
audited). Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import crash, explain

FOUND, BAD_INPUT = 1, 2
DEFAULT_REPORT = Path("harness-report")
_ON_PATH = Path(__file__).with_name("inject") / "on_path"
_BY_TERMINAL = 0x80  # SI_KERNEL: the whole foreground group has got this signal already
_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LATE = 5.0  # seconds beyond --hang after which a process that does not even look is ended


class RunError(ValueError):
    """The request cannot be carried out; one line says why and what to do."""


@dataclass(frozen=True)
class Request:
    """What to run and how.

    Attributes:
        command: the program and its arguments.
        report: folder that a failure is written to.
        perturb: seed of the preemptions, or None for none.
        hooks: False leaves only capture: exceptions that end a thread, and the audit at the end.
        hang: seconds without progress inside a compile after which the program is ended; 0: never.
        unfix: names of torch's repairs that are taken out first (:mod:`harness.unfix`).
    """

    command: Sequence[str]
    report: Path = DEFAULT_REPORT
    perturb: int | None = None
    hooks: bool = True
    hang: float = 0.0
    unfix: Sequence[str] = ()

    def check(self) -> None:
        """Raises :class:`RunError` where the request contradicts itself or names what is not."""
        from harness.unfix import CATALOGUE

        if not self.command:
            raise RunError(
                "no program is given; write it after --, as in 'harness run -- python x.py'"
            )
        if self.perturb is not None and not self.hooks:
            raise RunError("--perturb works at the hook points; leave --no-hooks out")
        if self.hang and not self.hooks:
            raise RunError("--hang needs the hook points; leave --no-hooks out")
        if not 0 <= self.hang < 1e6:
            raise RunError(f"--hang must be a number of seconds, not {self.hang:g}")
        if shutil.which(program := self.command[0]) is None:
            if not Path(program).is_file():
                raise RunError(f"{program}: command not found")
            hint = f"; try 'harness run -- python {program}'" if program.endswith(".py") else ""
            raise RunError(f"{program}: cannot be executed{hint}")
        for name in self.unfix:
            if name not in CATALOGUE:
                raise RunError(f"there is no unfix {name!r}; there are {', '.join(CATALOGUE)}")
        try:
            if self.report.exists() and not self.report.is_dir():
                raise RunError(f"--report {self.report} is not a folder")
            if crash.is_foreign(self.report):
                raise RunError(f"--report {self.report} holds other files; name a new folder")
        except OSError as error:
            raise RunError(f"--report {self.report} cannot be read: {error}") from error
        if not _can_be_written(self.report):  # known now, not when a program of hours has failed
            raise RunError(f"--report {self.report} cannot be written; name another folder")


def run(request: Request) -> int:
    """Runs the program and returns the exit code; says what was found on standard error.

    Raises:
        RunError: the request is wrong, or there is no such program.
    """
    request.check()
    try:
        crash.clear(request.report)
    except OSError as error:
        raise RunError(f"--report {request.report} cannot be emptied: {error}") from error
    try:
        state = Path(tempfile.mkdtemp(prefix="harness-run-"))
    except OSError as error:
        raise RunError(f"no temporary folder can be made: {error}; set TMPDIR") from error
    try:
        environment = os.environ | {
            "PYTHONPATH": _path_with(os.environ.get("PYTHONPATH", "")),
            "HARNESS_RUN": json.dumps(_configuration(request, state)),
        }
        status = _Supervisor(request, state).run(environment)
        return _conclude(request, state, status)
    finally:
        shutil.rmtree(state, ignore_errors=True)


def _configuration(request: Request, state: Path) -> dict[str, Any]:
    return {
        "version": harness.__version__,
        "parent": os.getpid(),
        "report": str(request.report.absolute()),
        "state": str(state),
        "hooks": request.hooks,
        "perturb": request.perturb,
        "hang": request.hang,
        "unfix": list(request.unfix),
    }


def _can_be_written(folder: Path) -> bool:
    """Whether ``folder``, or the nearest folder above it that exists, takes new files."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _path_with(old: str) -> str:
    return f"{_ON_PATH}{os.pathsep}{old}" if old else str(_ON_PATH)


class _Supervisor:
    """Starts the program, hands signals on, and waits for its end."""

    def __init__(self, request: Request, state: Path) -> None:
        self._request = request
        self._state = state
        self._quiet: dict[Path, tuple[float, int]] = {}  # time of a beat, looks that it had since

    def run(self, environment: Mapping[str, str]) -> int:
        """Returns the wait status."""
        # Blocked, not handled: they are taken out one by one below, with their sender.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
        try:
            return self._wait(self._spawn(environment, mask))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _spawn(self, environment: Mapping[str, str], mask: set[Any]) -> int:
        command = list(self._request.command)
        # Python ignores these two for itself; a program expects the default.
        default = [signal.SIGPIPE, signal.SIGXFSZ]
        try:
            return os.posix_spawnp(
                command[0], command, environment, setsigmask=mask, setsigdef=default
            )
        except OSError as error:
            raise RunError(f"{command[0]}: cannot be started ({error.strerror})") from error

    def _wait(self, pid: int) -> int:
        signals = {*_FORWARDED, signal.SIGCHLD}
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            # Once a second also without a signal: SIGCHLD may have been another child's.
            info = signal.sigtimedwait(signals, 1.0)
            if info is None:
                self._end_the_stuck()
            elif info.si_signo != signal.SIGCHLD and info.si_code != _BY_TERMINAL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, info.si_signo)

    def _end_the_stuck(self) -> None:
        """Ends a process whose hang watch has stopped looking: native code keeps the GIL.

        Called once a second. It counts its own looks: no clock would notice that both of us had
        been stopped, by Ctrl-Z or with the whole machine.
        """
        if not self._request.hang:
            return
        for beat in self._state.glob("*.beat"):
            with contextlib.suppress(OSError):
                touched = beat.stat().st_mtime
                last, looks = self._quiet.get(beat, (None, 0))
                looks = looks + 1 if touched == last else 0
                self._quiet[beat] = touched, looks
                if looks > self._request.hang + _LATE:
                    beat.rename(beat.with_suffix(".stuck"))
                    os.kill(int(beat.stem), signal.SIGABRT)  # the fault handler writes the stacks


# -- the end -------------------------------------------------------------------------------------


def _conclude(request: Request, state: Path, status: int) -> int:
    died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = 128 + died if died is not None else os.WEXITSTATUS(status)
    _write_native_crashes(request, state)
    if died is not None:
        _say(f"{Path(request.command[0]).name} died by {_signal_name(died)}")
    states = {path.suffix for path in state.iterdir() if path.stem.isdigit()}
    if not states:
        _say(
            "nothing was watched: no Python interpreter of this program loaded the harness "
            "(python -I, -E or -S, or a new environment?)"
        )
        return code or BAD_INPUT
    if ".found" in states:
        for line in _headlines(request.report):
            _say(line)
        return code or FOUND
    if ".unwatched" in states:  # by which error it has been told when that came
        _say("not watched to the end, so nothing is known of the rest")
        return code or BAD_INPUT
    if died is None:
        _say(_clean(state))
    return code


def _write_native_crashes(request: Request, state: Path) -> None:
    """Makes a folder of what the fault handler wrote in a process that could do no more."""
    for path in state.glob("*.fault"):
        dump = _read(path)
        if not dump.strip():
            continue
        pid = path.stem
        facts: dict[str, Any] = {}
        for told in ("running", "clean", "unwatched", "found"):
            with contextlib.suppress(ValueError):
                facts = json.loads(_read(state / f"{pid}.{told}") or "{}") or facts
        folder = Path(facts.get("folder", request.report))
        stuck = (state / f"{pid}.stuck").exists()
        ended = (
            f"no progress for {request.hang:g} s, and the interpreter's lock was not given up"
            if stuck
            else next(iter(dump.splitlines())).removeprefix("Fatal Python error: ")
        )
        known: dict[str, Any] = {}
        timeline: dict[str, Any] = {}
        with contextlib.suppress(ValueError, OSError):  # what it had found before it died
            known = json.loads((folder / "crash.json").read_text())
            timeline = json.loads((folder / "timeline.json").read_text())
        why = crash.write_folder(
            folder,
            {
                "harness": harness.__version__,
                "origin": "run",
                "failures": [],
                "threads": [],
                "stuck": [],
                "unaudited": "the process died",
                "versions": facts.get("versions", {}),
                **{key: value for key, value in known.items() if key != "argv"},
                "process": {
                    "pid": int(pid),
                    "ended": ended,
                    "hung": ["a thread"] if stuck else [],
                    "native": not stuck,
                },
            },
            timeline=timeline,
            stacks=dump,
            argv=facts.get("argv", request.command),
        )
        if why is not None:
            _say(why)
        with contextlib.suppress(OSError):
            (state / f"{pid}.found").touch()


def _headlines(report: Path) -> list[str]:
    try:
        reports = explain.load(report)
    except explain.ExplainError as error:
        return [f"something was found, but {error}"]
    lines = [explain.headline(found) for found in reports]
    return [*lines, f"see 'harness explain {report}'"]


def _clean(state: Path) -> str:
    """The bound of a clean result: how much was seen."""
    ended, calls, threads, exposed = 0, 0, 0, 0
    without_hooks = False
    unaudited = ""
    for path in state.glob("*.clean"):
        facts = json.loads(_read(path) or "{}")
        counts = facts.get("counts", {})
        ended += 1
        calls += counts.get("calls", 0)
        threads += counts.get("threads", 0)
        exposed += sum(counts.get("exposures", {}).values())
        without_hooks = without_hooks or not facts.get("hooks", True)
        unaudited = unaudited or facts.get("unaudited", "")
    if not ended:
        arrived = any("versions" in _read(path) for path in state.glob("*.running"))
        if arrived:
            return "nothing found, but no process said how it ended (os._exit?): not audited"
        return "nothing to watch: torch._dynamo was not imported"
    audit = f"not audited: {unaudited}" if unaudited else "compile state at rest"
    if without_hooks:
        return f"clean: no thread died, {audit}"
    return (
        f"clean: {calls} compiled calls in {threads} threads, {exposed} of them beside another "
        f"thread's trace or annotation; {audit}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # the latter: there is no standard error
        sys.stderr.write(f"harness: {line}\n")
        sys.stderr.flush()
