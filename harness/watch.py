"""Looks on while threads compile: who is inside what, who was in danger, which state was up.

Two sources feed it. Hook points tell of every entry into a compiled function, every FX trace
and every annotation, in the thread that does it; a bystander thread samples the catalogue of
probes in between. Both write to one timeline.

*Exposure* is the point of the whole thing: a compiled call entered while another thread was
inside an FX trace, or an annotation entered while another thread was inside one. A guarded run
without exposure has shown nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from harness import probes
from harness.capture import Frame, message_of, stack_of
from harness.points import Event

_TIMELINE_LIMIT = 4000


@dataclass(frozen=True)
class Holder:
    """The thread that held the state at the moment when a victim failed.

    Attributes:
        thread: its name.
        state: name of the probe whose state it held.
        stack: where it was, outermost first.
    """

    thread: str
    state: str
    stack: tuple[Frame, ...] = field(repr=False, default=())


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
        self._not_at_rest: Counter[str] = Counter()
        self._at_entry: Counter[str] = Counter()
        self._stop = threading.Event()
        self._bystander: threading.Thread | None = None

    # -- bystander -----------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        self._stop.clear()
        if self._interval > 0:
            self._bystander = threading.Thread(
                target=self._look_on, name="race-bystander", daemon=True
            )
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
            with self._lock:
                self._not_at_rest[probe.name] += 1
                self._note("race-bystander", f"sees {probe.name}", probes.show(value))

    # -- events --------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Records one event; called in the thread that is at the point."""
        handler = getattr(self, "_on_" + event.point.replace(".", "_"), None)
        with self._lock:
            self._idents[event.thread] = threading.get_ident()
            self._note(event.thread, event.point, _brief(event.error), event.step)
            if handler is not None:
                handler(event)

    def _on_call_enter(self, event: Event) -> None:
        self._entries[event.thread] += 1
        if self._others(self._in_trace, event.thread):
            self._exposures["fx-trace"][event.thread] += 1
        for probe in probes.CATALOGUE:  # the state that this call is about to meet
            if probe.core:
                value = probes.read(probe)
                if probes.at_rest(probe, value, self.rest) is False:
                    self._at_entry[probe.name] += 1

    def _on_call_settled(self, event: Event) -> None:
        if event.error is not None:
            self._blame(event.thread, "fx-tracing-flag", self._others(self._in_trace, event.thread))

    def _on_trace_begin(self, event: Event) -> None:
        self._traces[event.thread] += 1
        self._in_trace[event.thread] += 1

    def _on_trace_left(self, event: Event) -> None:
        self._in_trace[event.thread] -= 1

    def _on_annotate_tested(self, event: Event) -> None:
        if self._others(self._in_annotation, event.thread):
            self._exposures["annotation"][event.thread] += 1
        self._in_annotation[event.thread] += 1

    def _on_annotate_left(self, event: Event) -> None:
        # An annotate that failed before its test was never counted as inside.
        self._in_annotation[event.thread] = max(0, self._in_annotation[event.thread] - 1)
        if event.error is not None and self._last_annotation_exit not in (None, event.thread):
            self._blame(event.thread, "traceback-meta", [str(self._last_annotation_exit)])
        self._last_annotation_exit = event.thread

    def _on_flex_eager(self, event: Event) -> None:
        self._eager_flex[event.thread] += 1

    def _on_lock_held(self, event: Event) -> None:
        self._lock_owner = event.thread

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
                "holders": {victim: asdict(holder) for victim, holder in self.holders.items()},
                "timeline": list(self.timeline),
                "timeline_dropped": self.dropped,
            }

    def _blame(self, victim: str, state: str, others: list[str]) -> None:
        if not others or victim in self.holders:
            return
        thread = others[0]
        frame = sys._current_frames().get(self._idents.get(thread, -1))
        self.holders[victim] = Holder(thread, state, stack_of(frame) if frame else ())

    def _note(self, thread: str, what: str, detail: str, step: int | None = None) -> None:
        if len(self.timeline) >= _TIMELINE_LIMIT:
            self.dropped += 1
            return
        self.timeline.append(
            {
                "t": round(time.monotonic() - self._started, 6),
                "thread": thread,
                "what": what,
                "step": step,
                "detail": detail,
            }
        )

    @staticmethod
    def _others(inside: Mapping[str, int], thread: str) -> list[str]:
        return [name for name, count in inside.items() if count > 0 and name != thread]


def _brief(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {message_of(error)}"[:200]
