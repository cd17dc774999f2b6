"""The harness inside a program started by ``harness run``: what it installs, and when.

At start-up only what is cheap and cannot break anything: two exception hooks that call the ones
they replace, a handler at exit, and a finder that waits for ``torch._dynamo``. When the program
has imported that, the rest values of the probes are saved, the hooks installed, and the C-level
fault handler pointed at a file. Failures inside the harness never reach the program: they are one
line on standard error, and the watching ends.

What the process has to say goes to a state file of the command that started it, whose name tells
the state, so that it can be told on a full disk: ``PID.running``, ``PID.found``, ``PID.clean``,
and ``PID.unwatched`` where the watching ended before the process.

A worker of ``multiprocessing`` ends neither through the exception hook nor, where it was forked,
through the handlers at exit: it is asked among multiprocessing's own finalizers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.inject.arrival import Arrival

if TYPE_CHECKING:
    from harness.inject.recorder import Incident, Recorder

TORCH = ("torch", "torch._dynamo")
_LAST = -1000  # after the program's own finalizers
_WRITES = 10  # folders written while the program runs; the last one is written at its end
# State of torch's own that is up only while somebody traces. Other probes (the stance, settings)
# may be changed by a program for good, so their change is told and is no failure.
STUCK = (
    "fx-tracing-flag",
    "fx-patcher",
    "module-call",
    "module-getattr",
    "is-compiling",
    "is-exporting",
    "traceback-meta",
    "traceback-preserve",
    "traceback-replay",
    "make-fx-tracer",
    "export-hierarchy",
    "dispatch-mode",
    "dispatch-mode-outside",
    "dispatch-mode-compiled",
    "region-id",
    "skip-guards",
)

agent: Agent | None = None


def start(configuration: str) -> None:
    """Called once by sitecustomize with the text that ``harness run`` put in the environment."""
    global agent
    if agent is None:
        agent = Agent(json.loads(configuration))
        agent.begin()


class Agent:
    """One per process."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.pid = os.getpid()
        self.state = "running"
        self.trouble = ""
        self.ended = ""  # how the process is ended by us, if it is
        self.recorder: Recorder | None = None
        self._perturb: Any = None
        self._hooks: Any = None
        self._hang: Any = None
        self._faults: Any = None
        self._faults_at = ""
        self._rest: dict[str, Any] = {}
        self._unfix: dict[str, bool] = {}
        self._written = 0
        self._writing = threading.RLock()
        self._begun = time.monotonic()
        self._place()

    # -- installation --------------------------------------------------------------------------

    def begin(self) -> None:
        """Installs what does not need torch."""
        with contextlib.suppress(OSError):
            self._note_state({})
        self._sys_hook = sys.excepthook
        self._thread_hook = threading.excepthook
        sys.excepthook = self._main_died
        threading.excepthook = self._thread_died
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._after_fork)
        Arrival(TORCH, self._torch_arrived).watch()

    def _torch_arrived(self) -> None:
        try:
            self._install()
        except Exception as error:
            self._give_up("cannot watch this torch", error)

    def _install(self) -> None:
        from harness import unfix
        from harness.crash import versions
        from harness.redact import arguments

        recorder = self._need_recorder()
        self._take_rest_values(recorder)
        self._unfix = unfix.unfix(self.configuration["unfix"])
        if self.configuration["hooks"]:
            from harness.hooks import Hooks

            listeners = [recorder.on_event]
            if self.configuration["perturb"] is not None:
                from harness.inject.perturb import Perturb

                self._perturb = Perturb(self.configuration["perturb"])
                listeners.append(self._perturb.on_event)
            self._hooks = Hooks(*map(self._guarded, listeners))
            self._hooks.__enter__()
        if self.configuration["hang"]:
            from harness.inject.hang import HangWatch

            self._hang = HangWatch(
                recorder, self.configuration["hang"], self._state_path("beat"), self._hung
            )
            self._hang.start()
        self._point_fault_handler()
        self._meet_workers()
        with contextlib.suppress(OSError):
            self._note_state({"versions": versions(), "argv": arguments(sys.orig_argv)})

    def _take_rest_values(self, recorder: Recorder) -> None:
        from harness import probes

        recorder.rest = self._rest = probes.rest_values()

    def _guarded(self, listener: Callable[[Any], None]) -> Callable[[Any], None]:
        """``listener``, except that an error of ours ends the watching and not the program."""

        def on_event(event: Any) -> None:
            if self.trouble:
                return
            try:
                listener(event)
            except Exception as error:
                self._give_up(f"stops watching at {event.point}", error)

        return on_event

    def _give_up(self, what: str, error: Exception) -> None:
        self.trouble = f"{what}: {type(error).__name__}: {error}"
        _say(self.trouble)
        if self.state != "found":
            self._set_state("unwatched")

    def _point_fault_handler(self) -> None:
        import faulthandler

        if faulthandler.is_enabled():
            return  # the program's own
        with contextlib.suppress(OSError):
            self._faults_at = self._state_path("fault")
            self._faults = open(self._faults_at, "w")  # noqa: SIM115 (until the end)
            faulthandler.enable(self._faults, all_threads=True)

    def _redirect_faults(self) -> None:
        """In a forked child: the handler's descriptor, if it is ours still, gets a file of its own.

        The handler itself is not touched: the program may have pointed it elsewhere since.
        """
        with contextlib.suppress(OSError, ValueError):  # the latter: it is closed
            descriptor = self._faults.fileno()
            if os.path.samestat(os.fstat(descriptor), os.stat(self._faults_at)):
                self._faults_at = self._state_path("fault")
                with open(self._faults_at, "w") as own:
                    os.dup2(own.fileno(), descriptor, inheritable=False)

    def _meet_workers(self) -> None:
        """Arranges that a multiprocessing worker, this one or one to come, tells how it ended."""
        from multiprocessing import util

        util.register_after_fork(self, Agent._when_worker_ends)  # a fork forgets its finalizers
        self._when_worker_ends()

    def _when_worker_ends(self) -> None:
        from multiprocessing import util

        util.Finalize(None, self._worker_ends, exitpriority=_LAST)

    def _worker_ends(self) -> None:
        """Called by multiprocessing, in a worker while what its target raised passes through."""
        from multiprocessing import parent_process

        if parent_process() is None:
            return
        if (error := sys.exc_info()[1]) is not None:
            self._died(error)
        self._at_exit()

    def _place(self) -> None:
        """The process that the command started writes to the folder itself, others below it."""
        report = self.configuration["report"]
        first = os.getppid() == self.configuration["parent"]
        self.folder = report if first else os.path.join(report, f"process-{self.pid}")
        self._first = first

    def _after_fork(self) -> None:
        self.pid = os.getpid()
        self.state, self._written = "running", 0
        self._writing = threading.RLock()
        self._hang = None  # its thread is the parent's
        self._place()
        if self._faults is not None:
            self._redirect_faults()
        if self.recorder is not None:
            self.recorder.reset()
            if self._rest:  # what a thread of the parent had up is nobody's left-over here
                self._take_rest_values(self.recorder)
        if self._perturb is not None:
            self._perturb.reset()
        with contextlib.suppress(OSError):
            self._note_state({})

    # -- failures ------------------------------------------------------------------------------

    def _main_died(self, kind: Any, error: BaseException, tb: Any) -> None:
        self._died(error)
        self._sys_hook(kind, error, tb)

    def _thread_died(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            self._died(arguments.exc_value)
        self._thread_hook(arguments)

    def _died(self, error: BaseException) -> None:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return
        if not self._first and not self._rest:
            return  # a helper process that has nothing to do with torch
        try:
            self._need_recorder().failed(error, "uncaught")
        except Exception as second:
            self._give_up("cannot record an exception", second)

    def _need_recorder(self) -> Recorder:
        if self.recorder is None:
            from harness.inject.recorder import Recorder

            self.recorder = Recorder(self._found, begun=self._begun)
        return self.recorder

    def _found(self, _incident: Incident) -> None:
        if self._written < _WRITES:
            self.write()
        self._set_state("found")

    def _hung(self, threads: list[str]) -> None:
        """Called by the hang watch: writes everything and ends the process."""
        seconds = self.configuration["hang"]
        self.ended = f"no progress for {seconds:g} s: {', '.join(threads)}"
        self.write(hung=threads)
        self._set_state("found")
        _say(f"{self.ended}; ending the program")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    # -- the end -------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        try:
            last = getattr(sys, "last_value", None)  # also where the hook had been replaced
            if isinstance(last, BaseException) and not hasattr(sys, "ps1"):
                self._died(last)
            self._close()
        except Exception as error:
            self._give_up("cannot say how the program ended", error)

    def _close(self) -> None:
        if self._hang is not None:
            self._hang.stop()
        stuck, unaudited = self._audit()
        found = stuck or (
            self.recorder is not None and any(i.counts for i in self.recorder.incidents)
        )
        if found:
            self.write(stuck=stuck, unaudited=unaudited)
            self._set_state("found")
        elif self._rest and not self.trouble:
            counts = self.recorder.counts() if self.recorder is not None else {}
            with contextlib.suppress(OSError):
                self._note_state(
                    {"counts": counts, "hooks": self._hooks is not None, "unaudited": unaudited}
                )
            self._set_state("clean")

    def _audit(self) -> tuple[list[dict[str, Any]], str]:
        """Rows of the probes that are stuck, and why nothing was audited, if so."""
        if not self._rest or self.recorder is None:
            return [], "torch._dynamo was not imported"
        if busy := self.recorder.busy(hooked=self._hooks is not None):
            return [], f"{', '.join(busy)} still compiles or calls compiled code"
        from harness import probes

        rows = probes.audit(self._rest)
        return [row for row in rows if row["at_rest"] is False and _by_torch(row)], ""

    def write(
        self,
        *,
        stuck: list[dict[str, Any]] | None = None,
        unaudited: str = "the program still runs",
        hung: list[str] | None = None,
    ) -> None:
        """Writes the folder with what is known now."""
        from pathlib import Path

        from harness import crash

        if self.recorder is None:
            return
        with self._writing:
            self._written += 1
            incidents = self.recorder.incidents
            first = next((i for i in incidents if i.counts), None)
            why = crash.write_folder(
                Path(self.folder),
                {
                    "harness": self.configuration["version"],
                    "origin": "run",
                    "process": {
                        "pid": self.pid,
                        "seconds": round(self.recorder.now(), 3),
                        "ended": self.ended,
                        "hung": hung or [],
                    },
                    "unfix": self._unfix,
                    "failures": [i.as_dict() for i in incidents if i.counts],
                    "caught": [i.as_dict() for i in incidents if not i.counts],
                    "threads": self.recorder.threads(),
                    "stuck": stuck or [],
                    "unaudited": unaudited,
                    "counts": self.recorder.counts(),
                    "schedule": self._perturb.schedule() if self._perturb is not None else {},
                    "facts": {"hooks": self._hooks is not None, "trouble": self.trouble},
                },
                timeline=self.recorder.timeline(),
                stacks={} if first is None else first.plain_stacks(),
                argv=getattr(sys, "orig_argv", sys.argv),
            )
        if why is not None:
            _say(why)

    # -- state files ---------------------------------------------------------------------------

    def _state_path(self, state: str) -> str:
        return os.path.join(self.configuration["state"], f"{self.pid}.{state}")

    def _note_state(self, facts: dict[str, Any]) -> None:
        facts = {"folder": self.folder, **facts}
        partial = self._state_path("part")
        with open(partial, "w") as file:
            json.dump(facts, file, default=str)
        os.replace(partial, self._state_path(self.state))

    def _set_state(self, state: str) -> None:
        """Renames the state file: that needs no room on a full disk."""
        if state != self.state:
            try:
                os.rename(self._state_path(self.state), self._state_path(state))
            except OSError:  # the first one could not be written
                with contextlib.suppress(OSError), open(self._state_path(state), "w"):
                    pass
            self.state = state


def _by_torch(row: dict[str, Any]) -> bool:
    """Whether a probe that is not at rest was left so by torch, not set by the program."""
    if row["probe"] in ("module-call", "module-getattr"):
        return "Tracer." in row["value"]  # a program may patch nn.Module itself
    return row["probe"] in STUCK


def _say(line: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(f"harness: {line}\n")
