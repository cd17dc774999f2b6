"""Looks on while threads compile: who is inside what, who was in danger, which state was up.

Two sources feed it. Hook points tell of every entry into a compiled function, every FX trace
and every annotation, in the thread that does it; a bystander thread samples the catalogue of
probes in between. Both write to one timeline.

*Exposure* is the point of the whole thing: a compiled call entered while another thread was
inside an FX trace, or an annotation entered while another thread was inside one. A guarded run
without exposure has shown nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any

from harness import probes
from harness.capture import Frame, message_of, stack_of
from harness.points import Event

_TIMELINE_LIMIT = 4000
_BYSTANDER = "race-bystander"


# Where a thread writes which states, or is about to: what decides who wrote last.
_FX = ("fx-tracing-flag", "fx-patcher", "module-call", "module-getattr")
WRITES: dict[str, tuple[str, ...]] = {
    "trace.begin": _FX,
    "trace.body": _FX,
    "trace.left": _FX,
    "annotate.write": ("traceback-meta",),
    "annotate.left": ("traceback-meta",),
    "patch.install": ("fx-patcher", "module-call", "module-getattr"),
    "patch.left": ("fx-patcher", "module-call", "module-getattr"),
    "meta.preserve": ("traceback-preserve",),
    "meta.restored": ("traceback-preserve",),
    "config.write": ("dynamo-config",),
    "lock.held": ("compile-lock",),
    "lock.released": ("compile-lock",),
}
_DEEPEST = 60  # innermost frames of a writer that are kept


@dataclass(frozen=True)
class Holder:
    """The thread that held the state at the moment when a victim failed.

    Attributes:
        thread: its name.
        state: name of the probe whose state it held.
        stack: where it was, outermost first.
        step: the work step that it was in.
        since: seconds on the trial's clock from which on it was inside; None when unknown.
        until: when it left; None when it did not.
        victim_since: when the victim entered what failed.
        failed_at: when the victim failed.
        write: the holder's last write of the state before that (:class:`Write`, as data).
    """

    thread: str
    state: str
    stack: tuple[Frame, ...] = field(repr=False, default=())
    step: int | None = None
    since: float | None = None
    until: float | None = None
    victim_since: float | None = None
    failed_at: float | None = None
    write: dict[str, Any] | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Write:
    """One thread's last write of a state.

    Attributes:
        thread: who wrote.
        point: where, by the name of the hook point.
        t: seconds on the trial's clock.
        step: the work step that it was in.
        stack: where it was, outermost first: file, line and function.
    """

    thread: str
    point: str
    t: float
    step: int | None
    stack: tuple[tuple[str, int, str], ...] = field(repr=False, default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the stack as the frames of a traceback."""
        frames = [
            {"file": file, "line": line, "function": function}
            for file, line, function in self.stack
        ]
        return {
            "thread": self.thread,
            "point": self.point,
            "t": self.t,
            "step": self.step,
            "stack": frames,
        }


class Watch:
    """Collects events and samples; a listener for :class:`harness.hooks.Hooks`.

    Args:
        interval: seconds between two samples of the bystander thread; 0 turns it off.
    """

    def __init__(self, *, interval: float = 0.02) -> None:
        self.rest = probes.rest_values()
        self.timeline: list[dict[str, Any]] = []
        self.dropped = 0
        self.holders: dict[str, Holder] = {}
        self._interval = interval
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._in_trace: dict[str, int] = defaultdict(int)
        self._in_annotation: dict[str, int] = defaultdict(int)
        self._last_annotation_exit: str | None = None
        self._idents: dict[str, int] = {}
        self._entries: Counter[str] = Counter()
        self._traces: Counter[str] = Counter()
        self._eager_flex: Counter[str] = Counter()
        self._exposures: dict[str, Counter[str]] = {
            "fx-trace": Counter(),
            "annotation": Counter(),
        }
        self._lock_owner: str | None = None
        self._lock_waiters: list[str] = []
        self._writes: dict[str, dict[str, Write]] = defaultdict(dict)  # state -> thread -> last
        self._trace_since: dict[str, float] = {}
        self._annotation_since: dict[str, float] = {}
        self._annotation_until: dict[str, float] = {}
        self._call_since: dict[str, float] = {}
        self._step: dict[str, int | None] = {}
        self._not_at_rest: Counter[str] = Counter()
        self._at_entry: Counter[str] = Counter()
        self._stop = threading.Event()
        self._bystander: threading.Thread | None = None

    # -- bystander -----------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        self._stop.clear()
        if self._interval > 0:
            self._bystander = threading.Thread(target=self._look_on, name=_BYSTANDER, daemon=True)
            self._bystander.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._bystander is not None:
            self._bystander.join()

    def _look_on(self) -> None:
        while not self._stop.wait(self._interval):
            for probe in probes.CATALOGUE:
                if probe.sampled and probe.scope == probes.PROCESS:
                    self._sample(probe)

    def _sample(self, probe: probes.Probe) -> None:
        value = probes.read(probe)
        if probes.at_rest(probe, value, self.rest) is False:
            shown = probes.show(value)  # a repr may run code that comes to a point, and so to us
            with self._lock:
                self._not_at_rest[probe.name] += 1
                self._note(_BYSTANDER, f"sees {probe.name}", shown)

    # -- events --------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Records one event; called in the thread that is at the point."""
        handler = getattr(self, "_on_" + event.point.replace(".", "_"), None)
        with self._lock:
            self._idents[event.thread] = threading.get_ident()
            self._step[event.thread] = event.step
            self._note(event.thread, event.point, _brief(event.error), event.step)
            if handler is not None:
                handler(event)
            if event.point in WRITES:
                self._wrote(event)

    def _wrote(self, event: Event) -> None:
        stack = _raw_stack(sys._getframe(2))
        write = Write(event.thread, event.point, self._now(), event.step, stack)
        for state in WRITES[event.point]:
            self._writes[state][event.thread] = write

    def _on_call_enter(self, event: Event) -> None:
        self._entries[event.thread] += 1
        self._call_since[event.thread] = self._now()
        if self._others(self._in_trace, event.thread):
            self._exposures["fx-trace"][event.thread] += 1
        for probe in probes.CATALOGUE:  # the state that this call is about to meet
            if probe.core:
                value = probes.read(probe)
                if probes.at_rest(probe, value, self.rest) is False:
                    self._at_entry[probe.name] += 1

    def _on_call_settled(self, event: Event) -> None:
        if event.error is None:
            return
        since = self._call_since.get(event.thread)
        others = self._others(self._in_trace, event.thread)
        if others:
            self._blame(event.thread, "fx-tracing-flag", others[0], self._trace_since, since)
        elif (writer := self._writer_of_a_stuck_flag(event.thread)) is not None:
            self._blame(event.thread, "fx-tracing-flag", writer, {}, since)

    def _on_trace_begin(self, event: Event) -> None:
        self._traces[event.thread] += 1
        if self._in_trace[event.thread] == 0:
            self._trace_since[event.thread] = self._now()
        self._in_trace[event.thread] += 1

    def _on_trace_left(self, event: Event) -> None:
        self._in_trace[event.thread] -= 1
        if self._in_trace[event.thread] == 0:
            self._let_go(event.thread, "fx-tracing-flag")

    def _on_annotate_tested(self, event: Event) -> None:
        if self._others(self._in_annotation, event.thread):
            self._exposures["annotation"][event.thread] += 1
        if self._in_annotation[event.thread] == 0:
            self._annotation_since[event.thread] = self._now()
        self._in_annotation[event.thread] += 1

    def _on_annotate_left(self, event: Event) -> None:
        # An annotate that failed before its test was never counted as inside.
        self._in_annotation[event.thread] = max(0, self._in_annotation[event.thread] - 1)
        culprit = self._last_annotation_exit
        if event.error is not None and culprit not in (None, event.thread):
            since = self._annotation_since.get(event.thread)
            self._blame(event.thread, "traceback-meta", str(culprit), self._annotation_since, since)
            self._let_go(str(culprit), "traceback-meta", self._annotation_until.get(str(culprit)))
        self._last_annotation_exit = event.thread
        self._annotation_until[event.thread] = self._now()

    def _on_flex_eager(self, event: Event) -> None:
        self._eager_flex[event.thread] += 1
        others = self._others(self._in_trace, event.thread)
        if others:
            since = self._call_since.get(event.thread)
            self._blame(event.thread, "fx-tracing-flag", others[0], self._trace_since, since)

    def _on_lock_wait(self, event: Event) -> None:
        if event.thread != self._lock_owner:  # the owner may take it again
            self._lock_waiters.append(event.thread)

    def _on_lock_held(self, event: Event) -> None:
        self._lock_owner = event.thread
        self._lock_waiters = [name for name in self._lock_waiters if name != event.thread]

    def _on_lock_released(self, event: Event) -> None:
        if self._lock_owner == event.thread:
            self._lock_owner = None

    # -- results -------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Plain data for a report."""
        with self._lock:
            return {
                "entries": dict(self._entries),
                "traces": dict(self._traces),
                "eager_flex": dict(self._eager_flex),
                "exposures": {name: dict(count) for name, count in self._exposures.items()},
                "seen_by_bystander": dict(self._not_at_rest),
                "seen_at_entry": dict(self._at_entry),
                "still_in_trace": {name: n for name, n in self._in_trace.items() if n},
                "lock_owner": self._lock_owner,
                "lock_waiters": list(self._lock_waiters),
                "writes": {
                    state: [write.as_dict() for write in sorted(by.values(), key=lambda w: w.t)]
                    for state, by in self._writes.items()
                },
                "holders": {victim: asdict(holder) for victim, holder in self.holders.items()},
                "timeline": list(self.timeline),
                "timeline_dropped": self.dropped,
            }

    def _writer_of_a_stuck_flag(self, victim: str) -> str | None:
        """Who last wrote the FX flag, if it is up though nobody traces."""
        flag = probes.by_name("fx-tracing-flag")
        if probes.at_rest(flag, probes.read(flag), self.rest) is not False:
            return None
        writes = [w for name, w in self._writes[flag.name].items() if name != victim]
        return max(writes, key=lambda write: write.t).thread if writes else None

    def _blame(
        self,
        victim: str,
        state: str,
        culprit: str,
        since: Mapping[str, float],
        victim_since: float | None,
    ) -> None:
        if victim in self.holders:
            return
        frame = sys._current_frames().get(self._idents.get(culprit, -1))
        write = self._writes[state].get(culprit)
        self.holders[victim] = Holder(
            culprit,
            state,
            stack_of(frame) if frame else (),
            step=self._step.get(culprit),
            since=since.get(culprit),
            victim_since=victim_since,
            failed_at=self._now(),
            write=write.as_dict() if write is not None else None,
        )

    def _let_go(self, culprit: str, state: str, when: float | None = None) -> None:
        """The culprit's time inside is over: that is the end of the overlap with its victims."""
        for victim, holder in self.holders.items():
            if holder.thread == culprit and holder.state == state and holder.until is None:
                self.holders[victim] = replace(holder, until=self._now() if when is None else when)

    def _now(self) -> float:
        return round(time.monotonic() - self._started, 6)

    def _note(self, thread: str, what: str, detail: str, step: int | None = None) -> None:
        # Of a long run the end is cut, but not the errors in it: they are what it is read for.
        failed = bool(detail) and thread != _BYSTANDER
        if len(self.timeline) >= _TIMELINE_LIMIT * (2 if failed else 1):
            self.dropped += 1
            return
        self.timeline.append(
            {
                "t": self._now(),
                "thread": thread,
                "what": what,
                "step": step,
                "detail": detail,
            }
        )

    @staticmethod
    def _others(inside: Mapping[str, int], thread: str) -> list[str]:
        return [name for name, count in inside.items() if count > 0 and name != thread]


class EagerFrames(logging.Handler):
    """Hears dynamo say that a function runs uncompiled from now on; a context manager.

    Args:
        found: thread -> what was said first; filled in while it is open.
    """

    def __init__(self, found: dict[str, str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def __enter__(self) -> EagerFrames:
        logging.getLogger("torch._dynamo").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch._dynamo").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """One log record; only that of an exceeded limit is kept."""
        if "torch._dynamo hit config." in str(record.msg):
            text = " ".join(record.getMessage().split())
            self._found.setdefault(str(record.threadName), text[:160])


def _raw_stack(frame: FrameType | None) -> tuple[tuple[str, int, str], ...]:
    """File, line and function of the innermost frames, outermost first; reads no source."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def _brief(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {message_of(error)}"[:200]
