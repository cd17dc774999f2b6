"""One fresh process and fresh compile caches per case; whatever happens in there becomes data.

A case is a module-level function that takes keyword arguments and returns plain data. It runs
in a fork of a server process that has imported torch once and has started neither a thread nor
a CUDA context (:mod:`harness.forkserver`), so a case starts in a fraction of a second and no
state survives it.

What ends how:

=====================  ==========================================================================
the function returns   ``returned``, its value is ``CaseResult.value``
it raises              ``raised``
segfault, kill -9      ``signal``, with the faulthandler dump where one could be written
``os._exit``           ``exit``
still there at the     ``hang``: faulthandler's watchdog, a C thread that needs no GIL, writes all
deadline               stacks and ends the process; a supervisor kills its process group if not
=====================  ==========================================================================

Nothing is left behind: a case is its own process group, killed when it has ended; the case dies
with the server (parent-death signal); the server ends itself and its cases when its parent is
gone, however the parent went. Linux only.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

# Imported by the server before the first case; a project adds its own.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
)
_SERVER_START_LIMIT = 300.0  # importing torch cold from a slow disk takes a minute at worst
_LONGEST = 1e6  # seconds; C timers overflow beyond some such figure
_GRACE = 10.0  # between the case's own watchdog and the supervisor's kill
_MAX_CAPTURE = 20_000  # characters of a case's output kept in a result


class IsolationError(RuntimeError):
    """The harness could not run a case at all; one line says why."""


@dataclass
class CaseResult:
    """How an isolated case ended.

    Attributes:
        ended: ``returned``, ``raised``, ``signal``, ``exit`` or ``hang``.
        what: one line for a person.
        value: what the function returned.
        error: traceback text, with ``raised``.
        dump: the faulthandler dump ("" when none was written).
        output: the end of the case's standard output and error.
        seconds: wall time from the request to the end.
        start_seconds: from the request to the point where the case's file is loaded.
        folder: the case's files, kept only if the isolation was told to.
    """

    ended: str
    what: str
    value: Any = None
    error: str = ""
    dump: str = ""
    output: str = field(default="", repr=False)
    seconds: float = 0.0
    start_seconds: float = 0.0
    folder: str | None = None

    def record(self) -> dict[str, Any]:
        """The trial's record with the process's own end added; the same shape in every case."""
        record = dict(self.value) if isinstance(self.value, Mapping) else {}
        record["process"] = {
            "ended": self.ended,
            "what": self.what,
            "error": self.error,
            "dump": self.dump,
            "seconds": round(self.seconds, 3),
            "start_seconds": round(self.start_seconds, 3),
        }
        return record


class Isolation:
    """Owns one fork server; a context manager. One per test process (so one per xdist worker).

    Args:
        preload: modules that the server imports before the first case.
        folder: where case folders are made (default: a temporary folder, removed at the end).
        keep: keep case folders (output, dump, caches); those of earlier runs stay as they are.
        environment: extra variables for the server and its cases.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = PRELOAD,
        folder: str | os.PathLike[str] | None = None,
        keep: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._preload = tuple(preload)
        self._keep = keep
        self._environment = dict(environment or {})
        self._own_folder = folder is None
        # Absolute: the working folder may be another one when a case is run.
        self._folder = Path(folder).absolute() if folder is not None else None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: _Channel | None = None
        self._case: int | None = None  # process group of the case that the server runs
        self._count = 0

    def __enter__(self) -> Isolation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server, or None before the first case."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the server and whatever case it still has, and removes the folder."""
        if self._channel is not None:
            self._channel.close()  # the server reads the end of the stream as "stop"
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._own_folder and self._folder is not None and not self._keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline: float = 120.0,
        label: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CaseResult:
        """Runs ``function(**arguments)`` in a fresh process.

        Args:
            function: defined at the top level of a file (its file and name are sent, not it).
            arguments: plain data (JSON).
            deadline: seconds after which the case counts as hung.
            label: name of the case's folder.
            environment: variables for this case only.

        Raises:
            IsolationError: the function or its arguments cannot be sent, the deadline is not a
                positive number of seconds, or the server does not start or dies.
        """
        if not 0 < deadline <= _LONGEST:
            raise IsolationError(f"a case's deadline must be positive and finite, not {deadline}")
        file, name = _address(function)
        plain = dict(arguments or {})
        try:
            json.dumps(plain)
        except (TypeError, ValueError) as error:
            raise IsolationError(f"{name}'s arguments must be plain data: {error}") from error
        with self._lock:
            channel = self._ensure_server()
            folder = self._case_folder(label or name)
            begun = time.monotonic()
            request = {
                "op": "run",
                "file": file,
                "name": name,
                "arguments": plain,
                "folder": str(folder),
                "deadline": deadline,
                "sys_path": [str(entry) for entry in sys.path],
                "environment": dict(os.environ | self._environment | dict(environment or {})),
                "working_folder": os.getcwd(),
                "temporary": str(self._folder) if self._own_folder and not self._keep else None,
            }
            try:
                channel.send(request)
                started = channel.receive(deadline + _GRACE)
                self._case = None if started is None else int(started["pid"])
                ended = channel.receive(begun + deadline + _GRACE - time.monotonic())
                if ended is None:
                    channel.send({"op": "kill"})
                    ended = channel.receive(_GRACE)
            except BaseException as error:
                # A timeout plugin, Ctrl-C or a broken server: the case must not outlive us.
                self._abandon()
                if isinstance(error, OSError | EOFError):
                    raise IsolationError(f"the fork server died during {name}: {error}") from error
                raise
            if started is None or ended is None:
                self._abandon()
                raise IsolationError(f"the fork server did not answer during {name}")
            self._case = None
            result = _result(folder, ended, deadline, time.monotonic() - begun)
            result.start_seconds = max(0.0, float(started["started"]) - begun)
            if self._keep:
                result.folder = str(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            return result

    # -- server --------------------------------------------------------------------------------

    def _ensure_server(self) -> _Channel:
        if self._channel is not None and self._process is not None:
            if self._process.poll() is None:
                return self._channel
            self._abandon()
        ours, theirs = socket.socketpair()
        # NumPy's OpenBLAS starts its pool when it is imported; a process that forks has one thread.
        environment = {"OPENBLAS_NUM_THREADS": "1"} | os.environ | self._environment
        # The server is run by file, not by name: it must work whatever the working folder is.
        command = [
            sys.executable,
            str(Path(__file__).with_name("forkserver.py")),
            str(theirs.fileno()),
            str(os.getpid()),
            json.dumps(self._preload),
        ]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        channel = self._channel = _Channel(ours)
        try:
            ready = channel.receive(_SERVER_START_LIMIT)
        except (OSError, EOFError):
            ready = None
        except BaseException:  # Ctrl-C or a timeout plugin while the server imports
            self._abandon()
            raise
        if ready is None or "error" in ready:
            self._abandon()
            why = "it ended before it was ready" if ready is None else ready["error"]
            raise IsolationError(f"the fork server cannot start: {why}")
        return channel

    def _abandon(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            # Give it the moment that it needs to kill its case; its case dies with it anyway.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._case is not None:
            # A server that was killed itself takes its case along, but not the case's children.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._case, signal.SIGKILL)
            self._case = None

    def _case_folder(self, label: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="race-"))
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)[:80]
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._count += 1
            folder = self._folder / f"{self._count:03d}-{safe}"
            # One that an earlier run has kept holds its answer and its caches.
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder


class _Channel:
    """JSON lines over a socket, with a deadline on every read."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """One message, or None when none came in time; EOFError when the other side is gone."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                data = self._socket.recv(65536)
                if not data:
                    raise EOFError("end of stream")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()


def _address(function: Callable[..., Any]) -> tuple[str, str]:
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))  # a decorator's file is another
    except TypeError:
        file = None
    if not file or not name or "." in name or "<" in name:
        raise IsolationError(
            f"{function!r} cannot run in its own process: define it at the top level of a file"
        )
    return str(Path(file).resolve()), name


def _result(folder: Path, ended: Mapping[str, Any], deadline: float, seconds: float) -> CaseResult:
    status = int(ended["status"])
    dump = _read(folder / "faulthandler.log")
    output = _read(folder / "output.log")[-_MAX_CAPTURE:]
    answer = folder / "answer.json"
    common: dict[str, Any] = {"dump": dump, "output": output, "seconds": seconds}
    if ended.get("killed"):
        what = f"killed: still there {_GRACE:g} s after its deadline of {deadline:g} s"
        return CaseResult("hang", what, **common)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return CaseResult("signal", f"died by {signal.Signals(number).name}", **common)
    code = os.WEXITSTATUS(status)
    if dump.startswith("Timeout (") or "\nTimeout (" in dump:
        return CaseResult("hang", f"had not ended after its deadline of {deadline:g} s", **common)
    if code == 0 and answer.exists():
        data = json.loads(answer.read_text())
        if "error" in data:
            return CaseResult("raised", data["what"], error=data["error"], **common)
        return CaseResult("returned", "returned", value=data["value"], **common)
    return CaseResult("exit", f"ended by exit code {code} without a result", **common)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
