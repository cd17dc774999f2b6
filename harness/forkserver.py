"""The process behind :mod:`harness.isolate`: imports torch once, forks once per case.

Started as ``python forkserver.py SOCKET_FD PARENT_PID PRELOAD_JSON``; run by file, so it imports
nothing of the harness. It has one thread only, as a process that forks must.

It ends, with its case, when the stream to its parent closes, and also when its parent process
is no longer PARENT_PID: a timer looks at that, because a copy of the stream's other end can
live on in some other child of the parent, and because during the imports nobody reads the stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_LOOK_AT_PARENT_EVERY = 0.25


class _State:
    case: int | None = None  # process (and group) id of the running case
    temporary: str | None = None  # what nobody else removes if the parent goes without a word


def main() -> None:
    """Serves cases until the parent is gone."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    parent = int(sys.argv[2])

    def look_at_parent(*_: object) -> None:
        if os.getppid() != parent:
            _stop()

    signal.signal(signal.SIGALRM, look_at_parent)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_AT_PARENT_EVERY, _LOOK_AT_PARENT_EVERY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        for name in json.loads(sys.argv[3]):
            importlib.import_module(name)
    except BaseException as error:
        _send(channel, {"error": f"cannot import {name}: {type(error).__name__}: {error}"})
        return
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        _send(channel, {"error": f"the preloaded modules started {threads - 1} threads"})
        return
    print(end="", flush=True)  # or every case would print once more what a preload has printed
    _send(channel, {"ready": os.getpid()})
    _serve(channel, wake_read)
    _stop()


def _serve(channel: socket.socket, wake: int) -> None:
    buffer = b""
    killed = False
    sources: list[Any] = [channel, wake]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        if _State.case is not None:
            pid, status = os.waitpid(_State.case, os.WNOHANG)
            if pid:
                _kill_group(pid)  # what the case itself started
                _State.case = None
                _send(channel, {"status": status, "killed": killed})
        if channel in readable:
            data = channel.recv(65536)
            if not data:
                return
            buffer += data
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                request = json.loads(line)
                if request["op"] == "run":
                    _State.temporary = request["temporary"]
                    killed = False
                    _fork(channel, request)
                elif request["op"] == "kill" and _State.case is not None:
                    killed = True
                    _kill_group(_State.case)


def _fork(channel: socket.socket, request: dict[str, Any]) -> None:
    server = os.getpid()
    # The case says "started" itself, over a pipe, so that the figure includes the fork.
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            _case(request, server, channel, write_end)
        finally:
            os._exit(70)  # _case ends the process itself
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    _State.case = pid
    os.close(write_end)
    stamp = b""
    while chunk := os.read(read_end, 64):
        stamp += chunk
    os.close(read_end)
    started = float(stamp or b"0") or time.monotonic()
    _send(channel, {"started": started, "pid": pid})


def _case(request: dict[str, Any], server: int, channel: socket.socket, stamp: int) -> NoReturn:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _die_with(server)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel.close()
    folder = Path(request["folder"])
    # As the parent is now, not as it was when the server started.
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["working_folder"])
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ[variable] = str(folder / name)
    _redirect(folder / "output.log")
    dump = open(folder / "faulthandler.log", "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.enable(dump, all_threads=True)
    faulthandler.dump_traceback_later(request["deadline"], exit=True, file=dump)
    os.write(stamp, str(time.monotonic()).encode())
    os.close(stamp)
    sys.path[:] = request["sys_path"]
    try:
        value = _load(request["file"], request["name"])(**request["arguments"])
        answer = json.dumps({"value": value})
    except BaseException as error:
        first = traceback.format_exception_only(error)[0].splitlines()[0]
        # Python prints a syntax error's place first, and its name last.
        what = f"{type(error).__name__}: {error}" if isinstance(error, SyntaxError) else first
        answer = json.dumps({"error": traceback.format_exc(), "what": what})
    # Whole or not at all: a kill between the two lines must not look like an answer.
    partial = folder / "answer.json.part"
    partial.write_text(answer)
    partial.rename(folder / "answer.json")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads that hang must not keep the process, nor atexit hooks of torch.
    os._exit(0)


def _die_with(server: int) -> None:
    """The kernel kills this process when the server's only thread ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it ended between the fork and the line above
        os._exit(70)


def _load(file: str, name: str) -> Any:
    module_name = f"race_case_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _redirect(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a case prints outlives its crash


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a parent that is gone needs no answer
        channel.sendall(json.dumps(message).encode() + b"\n")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _stop() -> NoReturn:
    if _State.case is not None:
        _kill_group(_State.case)
    if _State.temporary is not None:
        shutil.rmtree(_State.temporary, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
