"""Remembers who is inside what while a program runs for hours, and freezes the moment of a failure.

A listener for :class:`harness.hooks.Hooks`, made for a program that is not a trial: memory is
bounded (rings of events and closed spans), threads come and go, and what counts is the time just
before a failure, not the start. At an exception the stacks of all threads are taken at once, in
the thread that fails, and the holder of the state is named by the table in
:mod:`harness.inject.blame`.

Not covered: exceptions that never leave a compiled call or an annotation and that the program
catches itself; state that no probe of :mod:`harness.probes` knows.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any

from harness import probes
from harness.capture import PASSED, CapturedError, Frame, capture_error, message_of
from harness.inject.blame import ANNOTATION, COMPILE, TRACE, rule_for
from harness.points import Event

CALL, WAIT = "call", "wait for the compile lock"
_EVENTS, _SPANS, _LANES, _INCIDENTS = 4000, 1000, 512, 50
_DEPTH = 80  # frames of a stack that is kept for later
_MARK = "_race_incident"
_OURS = __file__.rsplit("inject/", 1)[0]
_COMPILER = ("/torch/_dynamo/", "/torch/fx/")
_LISTENERS = _OURS + "inject/"
# A program that is asked to end has not failed.
_ASKED = (KeyboardInterrupt, SystemExit, GeneratorExit)


@dataclass
class Span:
    """A thread was inside something, from ``start`` to ``end`` [s]; None while it still is."""

    thread: str
    kind: str
    start: float
    end: float | None = None
    raw_stack: tuple[tuple[CodeType, int], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {
            "thread": self.thread,
            "kind": self.kind,
            "start": round(self.start, 6),
            "end": None if self.end is None else round(self.end, 6),
        }


@dataclass
class Culprit:
    """Who held the state that a victim failed on.

    Attributes:
        thread: its name.
        state: the state's name.
        how: ``inside`` at that very moment; or it left while the victim was inside; or it was the
            last to leave before, and the state stayed.
        span: when it was inside.
        stack: where it was then, outermost first (for one that had left: where it entered).
    """

    thread: str
    state: str
    how: str
    span: Span
    stack: tuple[Frame, ...] = field(repr=False, default=())


@dataclass
class Incident:
    """One exception, and what everybody did at that moment.

    Attributes:
        stack: what stands above the traceback.
        window: the victim's own call or annotation, if it was inside one.
    """

    thread: str
    t: float
    where: str
    error: CapturedError
    stack: tuple[Frame, ...] = field(repr=False)
    window: Span | None
    culprit: Culprit | None
    others: list[Span]
    probes: dict[str, str]
    stacks: dict[str, tuple[Frame, ...]] = field(repr=False)
    died: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is a finding: the thread died of it, or another thread was the cause."""
        return self.died or self.culprit is not None

    def plain_stacks(self) -> dict[str, list[dict[str, Any]]]:
        """The other threads' stacks at that moment."""
        return {name: [asdict(f) for f in frames] for name, frames in self.stacks.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain data; spans that were open then are shown as they are now."""
        culprit = self.culprit
        return {
            "thread": self.thread,
            "t": round(self.t, 6),
            "where": self.where,
            "died": self.died,
            "error": self.error.as_dict(),
            "stack": [asdict(frame) for frame in self.stack],
            "window": None if self.window is None else self.window.as_dict(),
            "culprit": None
            if culprit is None
            else {
                "thread": culprit.thread,
                "state": culprit.state,
                "how": culprit.how,
                "span": culprit.span.as_dict(),
                "stack": [asdict(frame) for frame in culprit.stack],
            },
            "others": [span.as_dict() for span in self.others],
            "probes": self.probes,
        }


class _Lane:
    """What the recorder knows of one thread."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.thread = threading.current_thread()
        self.open: dict[str, list[Span]] = {}
        self.counts: Counter[str] = Counter()

    def current(self, kind: str) -> Span | None:
        spans = self.open.get(kind)
        return spans[-1] if spans else None


class Recorder:
    """See the module's docstring. ``on_finding(incident)`` is called in the failing thread."""

    def __init__(self, on_finding: Callable[[Incident], None], *, begun: float) -> None:
        self.begun = begun
        self.rest: Mapping[str, Any] = {}
        self._on_finding = on_finding
        self.reset()

    def reset(self) -> None:
        """Forgets everything; a forked child starts here."""
        self.events = 0
        self.incidents: list[Incident] = []
        self._adding = threading.Lock()
        self.exposures: Counter[str] = Counter()
        self._local = threading.local()
        self._lanes: list[_Lane] = []
        self._gone: Counter[str] = Counter()  # the counts of threads that have no lane any more
        self._ring: deque[tuple[float, str, str, int | None, str]] = deque(maxlen=_EVENTS)
        self._closed: deque[Span] = deque(maxlen=_SPANS)
        # Open spans by kind, oldest first. One dict operation each, so that no lock is needed.
        self._open: dict[str, dict[int, Span]] = {k: {} for k in (TRACE, ANNOTATION, COMPILE)}
        self._samples: deque[dict[str, Any]] = deque(maxlen=_SPANS)
        self._last_sample: dict[str, str] = {}

    def now(self) -> float:
        """Seconds since ``begun`` (a value of ``time.monotonic``)."""
        return time.monotonic() - self.begun

    # -- events --------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Called in the thread that is at a point; cheap, and takes no lock."""
        now = self.now()
        lane = self._lane()
        self.events += 1
        error = event.error
        brief = "" if error is None else f"{type(error).__name__}: {message_of(error)[:160]}"
        self._ring.append((now, lane.label, event.point, event.step, brief))
        handler = _HANDLERS.get(event.point)
        if handler is not None:
            handler(self, lane, now, error)

    def _call_enter(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        lane.counts["calls"] += 1
        if self._open[TRACE] and self._inside(TRACE, lane):
            self.exposures["fx-trace"] += 1
        self._enter(lane, CALL, now)

    def _call_exit(self, lane: _Lane, now: float, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, _ASKED):
            self.failed(error, "compiled call", now)
        self._leave(lane, CALL, now)

    def _trace_begin(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        lane.counts["traces"] += 1
        self._enter(lane, TRACE, now, stack=True)

    def _trace_body(self, _lane: _Lane, now: float, _error: BaseException | None) -> None:
        self._sample(now)

    def _trace_left(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        self._leave(lane, TRACE, now)
        self._sample(now)

    def _annotate_tested(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        if self._inside(ANNOTATION, lane):
            self.exposures["annotation"] += 1
        self._enter(lane, ANNOTATION, now, stack=True)

    def _annotate_left(self, lane: _Lane, now: float, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, _ASKED):
            tb = error.__traceback__
            while tb is not None and tb.tb_next is not None:
                tb = tb.tb_next
            if tb is not None and tb.tb_frame.f_code.co_name == "annotate":
                self.failed(error, "annotation", now)  # others only pass through it
        self._leave(lane, ANNOTATION, now)
        self._sample(now)

    def _lock_wait(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        if not lane.open.get(COMPILE):  # its owner may take it again
            self._enter(lane, WAIT, now)

    def _lock_held(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        self._leave(lane, WAIT, now)
        self._enter(lane, COMPILE, now, stack=True)

    def _lock_released(self, lane: _Lane, now: float, _error: BaseException | None) -> None:
        self._leave(lane, COMPILE, now)

    def _flex_eager(self, lane: _Lane, _now: float, _error: BaseException | None) -> None:
        lane.counts["eager flex"] += 1

    def _enter(self, lane: _Lane, kind: str, now: float, *, stack: bool = False) -> None:
        span = Span(lane.label, kind, now, raw_stack=_raw_stack(sys._getframe(1)) if stack else ())
        lane.open.setdefault(kind, []).append(span)
        if kind in self._open:
            self._open[kind][id(span)] = span

    def _leave(self, lane: _Lane, kind: str, now: float) -> None:
        if spans := lane.open.get(kind):
            span = spans.pop()
            span.end = now
            self._closed.append(span)
            if kind in self._open:
                self._open[kind].pop(id(span), None)

    def _inside(self, kind: str, but: _Lane) -> list[Span]:
        """Open spans of other threads, the outermost of each."""
        found: dict[str, Span] = {}
        for span in tuple(self._open[kind].values()):
            if span.thread != but.label:
                found.setdefault(span.thread, span)
        return list(found.values())

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            name = threading.current_thread().name
            taken = {other.label for other in tuple(self._lanes) if other.thread.is_alive()}
            label, number = name, 2
            while label in taken:
                label, number = f"{name} ({number})", number + 1
            lane = self._local.lane = _Lane(label)
            self._admit(lane)
        return lane

    def _admit(self, lane: _Lane) -> None:
        """One more thread. Beyond the limit those that have ended leave, but for what they did."""
        with self._adding:
            kept = list(self._lanes)
            if len(kept) >= _LANES:
                for ended in [other for other in kept if not other.thread.is_alive()]:
                    self._gone += ended.counts + Counter(threads=ended.counts["calls"] > 0)
                    kept.remove(ended)
            self._lanes = [*kept, lane]

    # -- failures ------------------------------------------------------------------------------

    def failed(self, error: BaseException, where: str, now: float | None = None) -> Incident | None:
        """Freezes the moment of ``error`` once; later calls find the same incident.

        ``where`` is "compiled call", "annotation" or "uncaught"; after the last one the thread
        is dead.
        """
        lane = self._lane()
        # The mark is text that names this process: an exception may be pickled and sent away.
        process, _, index = str(getattr(error, _MARK, "")).partition("-")
        if process == str(os.getpid()):
            incident = self.incidents[int(index)]
            if incident.died or where != "uncaught":
                return incident
        else:
            findings = sum(other.counts for other in tuple(self.incidents))
            if findings >= _INCIDENTS:
                return None
            # What a program catches all day must not leave a finding without a place.
            full = len(self.incidents) - findings >= _INCIDENTS and where != "uncaught"
            if full and rule_for(_captured(error)) is None:
                return None
            incident = self._freeze(lane, error, where, self.now() if now is None else now)
            if full and not incident.counts:
                return None
            with self._adding:
                self.incidents.append(incident)
                index = str(len(self.incidents) - 1)
            with contextlib.suppress(AttributeError):  # a class may forbid it
                setattr(error, _MARK, f"{os.getpid()}-{index}")
        if where == "uncaught":
            incident.died = True
            incident.error = _captured(error)  # the traceback has grown since, over the stack
            incident.stack = _above(incident.stack, incident.error.frames)
        if incident.counts:
            self._on_finding(incident)
        return incident

    def _freeze(self, lane: _Lane, error: BaseException, where: str, now: float) -> Incident:
        # First what changes while one looks; files are read and texts made afterwards.
        me = threading.get_ident()
        raw = {i: _raw_stack(f) for i, f in sys._current_frames().items() if i != me}
        own = _raw_stack(sys._getframe(1))
        window = lane.current(ANNOTATION if where == "annotation" else CALL)
        others = [s for kind in (TRACE, ANNOTATION, COMPILE) for s in self._inside(kind, lane)]
        held = self._not_at_rest()
        captured = _captured(error)
        stacks = {self._label(ident): _frames(stack) for ident, stack in raw.items()}
        return Incident(
            thread=lane.label,
            t=now,
            where=where,
            error=captured,
            stack=_frames(own),
            window=window,
            culprit=self._culprit(lane, captured, window, others, stacks, held, now),
            others=others,
            probes=held,
            stacks=stacks,
        )

    def _culprit(
        self,
        lane: _Lane,
        error: CapturedError,
        own: Span | None,
        others: list[Span],
        stacks: Mapping[str, tuple[Frame, ...]],
        held: Mapping[str, str],
        now: float,
    ) -> Culprit | None:
        rule = rule_for(error)
        if rule is None:
            return None
        since = own.start if own is not None else now
        gone = [s for s in tuple(self._closed) if s.thread != lane.label and s.start <= now]
        for kind in rule.spans:
            if inside := [s for s in others if s.kind == kind and s.start <= now]:
                span = inside[0]
                stack = stacks.get(span.thread) or _frames(span.raw_stack)
                return Culprit(span.thread, rule.state, "inside", span, stack)
            left = [s for s in gone if s.kind == kind and (s.end or 0.0) >= since]
            if left:
                last = max(left, key=_end)
                how = "left while the victim was inside"
                return Culprit(last.thread, rule.state, how, last, _frames(last.raw_stack))
        earlier = [s for s in gone if s.kind == rule.spans[0]]
        if not earlier or rule.state not in held:
            return None
        last = max(earlier, key=_end)
        how = "the last to leave, and left it so"
        return Culprit(last.thread, rule.state, how, last, _frames(last.raw_stack))

    def _label(self, ident: int) -> str:
        for lane in tuple(self._lanes):
            if lane.thread.ident == ident and lane.thread.is_alive():
                return lane.label
        for thread in threading.enumerate():
            if thread.ident == ident:
                return thread.name
        return f"thread {ident}"

    # -- probes --------------------------------------------------------------------------------

    def _not_at_rest(self) -> dict[str, str]:
        found = {}
        for probe in probes.CATALOGUE:
            if probe.core and probe.name in self.rest:
                value = probes.read(probe)
                if probes.at_rest(probe, value, self.rest) is False:
                    found[probe.name] = probes.show(value)
        return found

    def _sample(self, now: float) -> None:
        found = self._not_at_rest()
        if found != self._last_sample:
            self._last_sample = found
            self._samples.append({"t": round(now, 6), "not_at_rest": found})

    # -- results -------------------------------------------------------------------------------

    def busy(self, *, hooked: bool) -> list[str]:
        """Other threads that are alive and inside a compiled call, a trace or an annotation.

        Where no hook is on torch (``hooked`` False) their stacks tell.
        """
        if not hooked:
            frames, me = sys._current_frames(), threading.get_ident()
            return [self._label(i) for i, f in frames.items() if i != me and _in_the_compiler(f)]
        return [
            lane.label
            for lane in tuple(self._lanes)
            if lane.thread.is_alive()
            and lane.thread is not threading.current_thread()
            and any(lane.open.values())
        ]

    def inside_idents(self) -> dict[int, str]:
        """Identity -> name of each live thread that is inside anything, or waits for the lock."""
        return {
            lane.thread.ident: lane.label
            for lane in tuple(self._lanes)
            if lane.thread.is_alive() and lane.thread.ident and any(lane.open.values())
        }

    def counts(self) -> dict[str, Any]:
        """How much was seen: the bound of a clean result."""
        with self._adding:
            lanes, gone = tuple(self._lanes), Counter(self._gone)
        return {
            "calls": gone["calls"] + sum(lane.counts["calls"] for lane in lanes),
            "threads": gone["threads"] + sum(lane.counts["calls"] > 0 for lane in lanes),
            "traces": gone["traces"] + sum(lane.counts["traces"] for lane in lanes),
            "eager_flex": gone["eager flex"] + sum(lane.counts["eager flex"] for lane in lanes),
            "exposures": dict(self.exposures),
            "events": self.events,
        }

    def threads(self) -> list[dict[str, Any]]:
        """One row per thread seen: its outcome, and for one that still runs its stack."""
        frames = sys._current_frames()
        dead = {incident.thread for incident in self.incidents if incident.died}
        caught = {incident.thread for incident in self.incidents} - dead
        rows = []
        for lane in tuple(self._lanes):
            here = lane.thread is threading.current_thread()
            alive = lane.thread.is_alive() and not here
            frame = frames.get(lane.thread.ident or -1) if alive else None
            if lane.label in dead:
                outcome = "raised"
            elif lane.label in caught:
                outcome = "raised, and the program caught it"
            else:
                outcome = "still running" if alive else "completed"
            rows.append(
                {
                    "thread": lane.label,
                    "outcome": outcome,
                    "calls": lane.counts["calls"],
                    "traces": lane.counts["traces"],
                    "eager_flex": lane.counts["eager flex"],
                    "inside": [s.as_dict() for spans in lane.open.values() for s in spans],
                    "stack": []
                    if frame is None
                    else [asdict(f) for f in _frames(_raw_stack(frame))],
                }
            )
        return rows

    def timeline(self) -> dict[str, Any]:
        """The last events, the spans behind them and the probes that were not at rest."""
        ring = tuple(self._ring)
        still = [s for lane in tuple(self._lanes) for spans in lane.open.values() for s in spans]
        return {
            "events": [
                {"t": round(t, 6), "thread": thread, "what": what, "step": step, "detail": detail}
                for t, thread, what, step, detail in ring
            ],
            "dropped": max(0, self.events - len(ring)),
            "spans": [span.as_dict() for span in (*tuple(self._closed), *still)],
            "probes": list(self._samples),
        }


_HANDLERS: dict[str, Callable[[Recorder, _Lane, float, BaseException | None], None]] = {
    "call.enter": Recorder._call_enter,
    "call.exit": Recorder._call_exit,
    "trace.begin": Recorder._trace_begin,
    "trace.body": Recorder._trace_body,
    "trace.left": Recorder._trace_left,
    "annotate.tested": Recorder._annotate_tested,
    "annotate.left": Recorder._annotate_left,
    "lock.wait": Recorder._lock_wait,
    "lock.held": Recorder._lock_held,
    "lock.released": Recorder._lock_released,
    "flex.eager": Recorder._flex_eager,
}


def _end(span: Span) -> float:
    return span.end or 0.0


def _in_the_compiler(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _COMPILER):
            return True
        frame = frame.f_back
    return False


def _raw_stack(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """Code and line of each frame, innermost first: no frame is kept alive, no file is read."""
    raw: list[tuple[CodeType, int]] = []
    while frame is not None and len(raw) < _DEPTH:
        raw.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(raw)


def _frames(raw: tuple[tuple[CodeType, int], ...]) -> tuple[Frame, ...]:
    frames = [
        Frame(
            file=code.co_filename,
            line=line,
            function=code.co_name,
            source=linecache.getline(code.co_filename, line).strip(),
            role=PASSED,
            central=any(part in code.co_filename for part in _COMPILER),
        )
        for code, line in reversed(raw)
    ]
    return _without_ours(tuple(frames))


def _above(stack: tuple[Frame, ...], traceback: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """What of ``stack`` stands above the outermost frame of ``traceback``."""
    outermost = next(((frame.file, frame.function) for frame in traceback), None)
    return tuple(takewhile(lambda frame: (frame.file, frame.function) != outermost, stack))


def _captured(error: BaseException) -> CapturedError:
    captured = capture_error(error)
    return replace(captured, frames=_without_ours(captured.frames))


def _without_ours(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Without the hooks in between, and without what a listener itself does at the end."""
    listener = next((n for n, f in enumerate(frames) if f.file.startswith(_LISTENERS)), len(frames))
    return tuple(frame for frame in frames[:listener] if not frame.file.startswith(_OURS))
