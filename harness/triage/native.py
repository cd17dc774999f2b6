"""Failures that are not Python exceptions: signals, C++, CUDA, NCCL, launchers' summaries.

Covered: `terminate called` with `what()`, c10's ``frame #0`` stacks, the NCCL watchdog, shells' and
kernels' kill lines, torchrun's `exitcode` lines and its table "Root Cause".

Not covered: core files, dmesg beyond the OOM killer's line, Slurm's accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.triage.events import Event, Kind
from harness.triage.lines import Line

_TERMINATE = re.compile(r"terminate called (?:after throwing an instance of '([^']{1,200})'|.*)")
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)$")
_NATIVE_FRAME = re.compile(r"^\s*frame #(\d+): (.{1,300})")
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: (?:WorkNCCL\()?SeqNum=(\d+), OpType=(\w+)"
    r"(?:.*?Timeout\(ms\)=(\d+))?(?:.*?ran for (\d+) milliseconds)?"
)
_WATCHDOG_OTHER = re.compile(
    r"(?:Process group watchdog thread terminated with exception|watchdog got stuck"
    r"|Received a dump signal due to a collective timeout|Heartbeat monitor timed out)(.*)"
)
_OOM_KILLER = re.compile(
    r"(?:Out of memory: Killed process (\d+)|oom-kill:|oom_reaper: reaped process"
    r"|Detected \d+ oom[_-]kill event|Memory cgroup out of memory: Killed process (\d+)"
    r"|OOMKilled)"
)
_SLURM = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT ")
_SHELL = re.compile(
    r"(?:^|: |\s)(Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Terminated"
    r"|Floating point exception)(?: +\(core dumped\))?(?:\s|$)"
)
_SHELL_LINE = re.compile(
    r"^(?:\S+: line \d+:\s+\d+ |(?:slurmstepd|srun|bash|make|/bin/\w+): .*|\[\d+\].*)?\s*"
    r"(?:Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Terminated"
    r"|Floating point exception)(?:\s*$|\s+\(core dumped\)|\s{2,}\S|:\s*\d)"
)
_SEGV_HANDLER = re.compile(r"\b(?:Caught|Received|received) signal (\d+) \(?(SIG\w+|[A-Z][\w ]+)")
_EXIT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_SIGNAL_TO = re.compile(r"Signal (\d+) \((SIG\w+)\) received by PID (\d+)")
_GOT_SIGNAL = re.compile(
    r"(?:[Rr]eceived|[Gg]ot) (?:death signal |signal )?(SIG(?:TERM|KILL|INT|HUP))\b"
    r"|SignalException: Process \d+ got signal: (\d+)"
)
_WORKER = re.compile(
    r"\b(?:[Pp]rocess|[Ww]orker|child)\b.{0,80}\b(?:exit ?code|exitcode|status)[ :=]+"
    r"(-\d+|13[0-9]|14[0-3])\b"
)
_BY_SIGNAL = re.compile(
    r"(?:was killed by signal|is killed by signal|killed by signal|terminated by signal):?\s*"
    r"(SIG\w+|\d+|\w+)"
)
_CUDA_LINE = re.compile(r"^(?:CUDA|HIP) error: .{1,200}|^CUDA out of memory.{0,200}")
_SIGNALS = {
    6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM", 4: "SIGILL",
    2: "SIGINT", 1: "SIGHUP",
}  # fmt: skip
_OF_SHELL = {
    "Killed": "SIGKILL", "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS",
    "Aborted": "SIGABRT", "Illegal instruction": "SIGILL", "Terminated": "SIGTERM",
    "Floating point exception": "SIGFPE",
}  # fmt: skip
_SUMMARY_FIELD = re.compile(r"^\s+(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
NATIVE_FRAMES = 60


@dataclass(slots=True)
class Native:
    """The native failures of one stream of lines."""

    name: str
    _crash: Event | None = None
    _frames: list[str] = field(default_factory=list)
    _patience: int = 0
    _summary: Event | None = None

    def feed(self, line: Line, hit: bool) -> tuple[bool, list[Event]]:
        """Whether the line was part of a native failure, and what is complete.

        ``hit``: one of the literals is in it; no native failure begins without one.
        """
        text = line.text
        out: list[Event] = []
        if self._summary is not None or "Root Cause (first observed failure)" in text:
            taken, events = self._torchrun(line, text)
            out += events
            if taken:
                return True, out
        if self._crash is not None:
            what = _WHAT.match(text)
            frame = _NATIVE_FRAME.match(text)
            if what:
                self._crash.message = what[1][:2000]
                return True, out
            if frame:
                if len(self._frames) < NATIVE_FRAMES:
                    self._frames.append(frame[2])
                self._patience = 0
                return True, out
            self._patience += 1
            if self._patience > 12:
                out += self.finish()
        if not hit:
            return False, out
        terminate = _TERMINATE.search(text)
        if terminate:
            out += self.finish()
            self._crash = self._event(line, Kind.NATIVE, "terminate", terminate[1] or "")
            self._frames, self._patience = [], 0
            return True, out
        for event in self._single(line, text):
            out.append(event)
            return True, out
        return False, out

    def _single(self, line: Line, text: str) -> Iterator[Event]:
        found = _WATCHDOG.search(text)
        if found:
            number, operation, limit, ran = found.groups()
            event = self._event(line, Kind.WATCHDOG, "NCCL watchdog", text[found.start() :][:1000])
            event.details = {"sequence": int(number), "operation": operation}
            if limit:
                event.details["timeout_ms"] = int(limit)
            if ran:
                event.details["ran_ms"] = int(ran)
            yield event
            return
        found = _WATCHDOG_OTHER.search(text)
        if found:
            yield self._event(line, Kind.WATCHDOG, "NCCL watchdog", text[found.start() :][:1000])
            return
        found = _OOM_KILLER.search(text)
        if found:
            event = self._event(line, Kind.KILLED, "SIGKILL", text[:300])
            event.details = {"by": "the kernel's out-of-memory killer", "signal": "SIGKILL"}
            yield event
            return
        if _SLURM.search(text):
            event = self._event(line, Kind.KILLED, "SIGTERM", text[:300])
            event.details = {"by": "Slurm", "signal": "SIGTERM"}
            yield event
            return
        found = _EXIT.search(text)
        if found:
            code = int(found[1])
            name = _SIGNALS.get(-code) if code < 0 else None
            event = self._event(
                line, Kind.KILLED if name else Kind.NOTICE, name or "exit", text[:300]
            )
            event.rank = event.rank if event.rank is not None else found[2]
            event.details = {"exit_code": code, "pid": int(found[3]), "local_rank": int(found[2])}
            yield event
            return
        found = _CUDA_LINE.match(text)
        if found and line.level not in ("INFO", "DEBUG"):
            yield self._event(line, Kind.NATIVE, "CUDA error", found[0])
            return
        name = _signal_in(text)
        if name:
            event = self._event(line, Kind.KILLED, name, text[:300])
            event.details = {"signal": name}
            yield event

    def _torchrun(self, line: Line, text: str) -> tuple[bool, list[Event]]:
        """The table at the end of torchrun's output; ``text`` belongs to it or ends it."""
        if "Root Cause (first observed failure)" in text:
            out = self._end_summary()
            self._summary = self._event(line, Kind.NOTICE, "torchrun", "root cause")
            return True, out
        assert self._summary is not None
        found = _SUMMARY_FIELD.match(text)
        if found:
            self._summary.details.setdefault(found[1], found[2].strip())
            return True, []
        if not text.strip() or text == "[0]:":
            return True, []
        return text.startswith(("====", "----")), self._end_summary()

    def _end_summary(self) -> list[Event]:
        event, self._summary = self._summary, None
        if event is None:
            return []
        rank = re.match(r"\d+", str(event.details.get("rank", "")))
        code = re.match(r"-?\d+", str(event.details.get("exitcode", "")))
        event.rank = rank[0] if rank else event.rank
        event.time = event.details.get("time", event.time)
        if code and _SIGNALS.get(-int(code[0])):
            event.kind, event.type = Kind.KILLED, _SIGNALS[-int(code[0])]
        event.message = ", ".join(f"{key} {value}" for key, value in event.details.items())
        return [event]

    def _event(self, line: Line, kind: Kind, what: str, message: str) -> Event:
        return Event(
            kind, line.place(self.name), type=what, message=message, rank=line.rank,
            thread=line.thread, time=line.time,
        )  # fmt: skip

    def finish(self) -> list[Event]:
        """What was being read."""
        return [*self._end_summary(), *self.end_crash()]

    def end_crash(self) -> list[Event]:
        """The crash of which nothing more will come, if any."""
        if self._crash is None:
            return []
        event, self._crash = self._crash, None
        event.details["native_frames"] = list(self._frames)
        return [event]


def signal_of(event: Event) -> str:
    """The signal by which a process ends that says this of itself: ``SIGSEGV``; "" if none."""
    if event.kind is Kind.KILLED:
        return event.type
    if event.kind is Kind.FATAL:  # "Segmentation fault"; any other one ends in abort()
        return _OF_SHELL.get(event.type, "SIGABRT")
    return "SIGABRT" if event.type == "terminate" else ""


def _signal_in(text: str) -> str | None:
    """The signal by which, as the line says, a process ended."""
    if _SHELL_LINE.match(text):
        found = _SHELL.search(text)
        if found:
            return _OF_SHELL[found[1]]
    for pattern in (_BY_SIGNAL, _SIGNAL_TO, _SEGV_HANDLER, _WORKER, _GOT_SIGNAL):
        found = pattern.search(text)
        if found:
            said = next(
                (group for group in reversed(found.groups()) if group and group.startswith("SIG")),
                None,
            )
            said = said or next((group for group in found.groups() if group), "")
            if said.startswith("SIG"):
                return said
            if said.lstrip("-").isdigit():
                number = abs(int(said))
                return _SIGNALS.get(number - 128 if number > 128 else number)
            return _OF_SHELL.get(said)
    return None
