"""From a record's events to what is drawn: a lane of spans per thread, sightings per probe.

A span is made of two events of one thread (``lock.wait`` and ``lock.held``: it waited). The order
of the events decides, so spans of a thread are nested or apart, never across each other; one that
was still open at the end says so. A probe has no spans: the bystander samples, and what was
between two samples is not known.

Not covered: phases for which the record has no pair of events, and what a thread does outside
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BYSTANDER = "race-bystander"
_SEES = "sees "


@dataclass(frozen=True)
class Stage:
    """A kind of span.

    Attributes:
        name: short, also the name of its colour in the page.
        says: what a person reads.
        row: where in its thread's lane it is drawn, from the outermost (0) down.
    """

    name: str
    says: str
    row: int


STAGES = {
    stage.name: stage
    for stage in (
        Stage("step", "work step", 0),
        Stage("held", "held back by the script", 1),
        Stage("warm", "warm call", 1),
        Stage("compiling", "call that compiles", 1),
        Stage("eager", "call that ran flex_attention eager", 1),
        Stage("raised", "call that raised", 1),
        Stage("backward", "backward", 1),
        Stage("lock", "waiting for the compile lock", 2),
        Stage("dynamo", "dynamo (holds the compile lock)", 2),
        Stage("annotation", "annotation in place", 2),
        Stage("aot", "AOT autograd", 3),
        Stage("inductor", "inductor", 3),
        Stage("trace", "FX trace", 4),
        Stage("flag", "trace with the flag up", 4),
    )
}

# first event -> (event that ends the span, stage)
_PAIRS = {
    "step.begin": ("step.end", "step"),
    "call.arrive": ("call.enter", "held"),
    "call.enter": ("call.exit", "warm"),
    "lock.wait": ("lock.held", "lock"),
    "lock.held": ("lock.released", "dynamo"),
    "trace.begin": ("trace.left", "trace"),
    # The flag is still up at trace.end, where a script may hold the thread: it ends with the trace.
    "trace.body": ("", "flag"),
    "annotate.body": ("annotate.left", "annotation"),
    "dynamo.begin": ("dynamo.end", "dynamo"),
    "aot.begin": ("aot.end", "aot"),
    "inductor.begin": ("inductor.end", "inductor"),
    "torch.autograd.graph:_engine_run_backward@entry": (
        "torch.autograd.graph:_engine_run_backward@exit",
        "backward",
    ),
}
# A span is not begun inside these: whoever holds the lock does not wait for it, and the backward
# that AOT autograd traces while a call compiles is not one that runs.
_NOT_INSIDE = {
    "lock.wait": ("lock.held",),
    "torch.autograd.graph:_engine_run_backward@entry": ("call.enter",),
}
_ENDS: dict[str, list[str]] = {}
for _first, (_last, _) in _PAIRS.items():
    _ENDS.setdefault(_last, []).append(_first)


@dataclass(frozen=True)
class Span:
    """A thread was in a stage.

    Attributes:
        stage: a key of :data:`STAGES`.
        begin, end: seconds on the watch's clock.
        step: the work step, or None.
        open: it had not ended when the record did.
    """

    stage: str
    begin: float
    end: float
    step: int | None = None
    open: bool = False


@dataclass(frozen=True)
class Lane:
    """One thread; its spans in the order of their begin, an outer one before what is inside."""

    thread: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Sighting:
    """The bystander saw a probe not at rest."""

    at: float
    value: str


@dataclass(frozen=True)
class Failure:
    """The moment at which a thread failed, as near as the events tell it.

    Attributes:
        thread: the victim.
        at: seconds on the watch's clock.
        what: one line.
        holder: the thread that held the state then, or "".
        state: that state, or "".
    """

    thread: str
    at: float
    what: str
    holder: str = ""
    state: str = ""


@dataclass(frozen=True)
class Timeline:
    """Everything that is drawn of one record; ``dropped`` events are missing in it."""

    lanes: tuple[Lane, ...]
    probes: dict[str, tuple[Sighting, ...]]
    failures: tuple[Failure, ...]
    begin: float
    end: float
    dropped: int = 0
    stages: tuple[Stage, ...] = field(default=())

    @property
    def seconds(self) -> float:
        """Its length; never 0."""
        return max(self.end - self.begin, 1e-6)


def timeline(record: Mapping[str, Any]) -> Timeline | None:
    """The timeline of a record, or None when nothing was recorded (a case that died natively)."""
    watch = record.get("watch", {})
    events: Sequence[Mapping[str, Any]] = watch.get("timeline", ())
    if not events:
        return None
    begin, end = min(e["t"] for e in events), max(e["t"] for e in events)
    by_thread: dict[str, list[Mapping[str, Any]]] = {}
    probes: dict[str, list[Sighting]] = {}
    for event in events:
        if event["thread"] == BYSTANDER:
            if event["what"].startswith(_SEES):
                name = event["what"].removeprefix(_SEES)
                probes.setdefault(name, []).append(Sighting(event["t"], event["detail"]))
        else:
            by_thread.setdefault(event["thread"], []).append(event)
    ended = {o["thread"] for o in record.get("outcomes", ()) if o["state"] != "unfinished"}
    lanes = tuple(
        Lane(thread, tuple(_spans(by_thread.get(thread, []), None if thread in ended else end)))
        for thread in _order(record, by_thread)
    )
    drawn = {span.stage for lane in lanes for span in lane.spans}
    return Timeline(
        lanes=lanes,
        probes={name: tuple(seen) for name, seen in sorted(probes.items())},
        failures=tuple(_failures(record, by_thread, end)),
        begin=begin,
        end=end,
        dropped=watch.get("timeline_dropped", 0),
        stages=tuple(stage for name, stage in STAGES.items() if name in drawn),
    )


def _order(record: Mapping[str, Any], by_thread: Mapping[str, Any]) -> list[str]:
    """The crew first, in its own order; then whoever else was seen."""
    crew = [outcome["thread"] for outcome in record.get("outcomes", ())]
    return [*crew, *sorted(set(by_thread) - set(crew))]


def _spans(events: Sequence[Mapping[str, Any]], end: float | None) -> list[Span]:
    """Pairs the events of one thread; what lies inside an outer span ends with it at the latest.

    ``end`` is where spans without an end are cut; None for a thread that has ended, whose last
    event is its end.
    """
    spans: list[Span] = []
    stack: list[tuple[str, Span]] = []  # first event, span so far

    def close(at: float, *, still_open: bool = False) -> None:
        first, span = stack.pop()
        if first != "call.arrive" or at - span.begin > 1e-3:  # else nobody held it back
            spans.append(replace(span, end=at, open=still_open))

    def enclosing(first: str) -> bool:
        return any(known == first for known, _ in stack)

    for event in events:
        what, at = event["what"], event["t"]
        for first in _ENDS.get(what, ()):
            if enclosing(first):
                while stack[-1][0] != first:  # its own end was not seen: an exception passed
                    close(at)
                if what == "call.exit" and event["detail"]:
                    _mark(stack, first, "raised")
                close(at)
        if what == "flex.eager":
            _mark(stack, "call.enter", "eager")
        if what == "lock.held":
            _mark(stack, "call.enter", "compiling")
        if what not in _PAIRS or any(enclosing(outer) for outer in _NOT_INSIDE.get(what, ())):
            continue
        stack.append((what, Span(_PAIRS[what][1], at, at, event["step"])))
    while stack:
        close(events[-1]["t"] if end is None else end, still_open=end is not None)
    return sorted(spans, key=lambda span: (span.begin, -span.end, STAGES[span.stage].row))


def _mark(stack: list[tuple[str, Span]], first: str, stage: str) -> None:
    """Says better what the innermost open span of this kind is."""
    for index in range(len(stack) - 1, -1, -1):
        known, span = stack[index]
        if known == first:
            if stage == "raised" or span.stage != "eager":
                stack[index] = (known, replace(span, stage=stage))
            return


def _failures(
    record: Mapping[str, Any], by_thread: Mapping[str, Sequence[Mapping[str, Any]]], end: float
) -> Iterator[Failure]:
    held = record.get("watch", {}).get("holders", {})
    for outcome in record.get("outcomes", ()):
        thread = outcome["thread"]
        holder = held.get(thread, {})
        blame = {"holder": holder.get("thread", ""), "state": holder.get("state", "")}
        events = by_thread.get(thread, ())
        if outcome["state"] == "raised":
            error = outcome.get("error") or {"type": "an exception", "message": ""}
            kind = error["type"].rpartition(".")[2]
            # In its last step: the same error may have been caught in an earlier one.
            last = [e for e in events if e["step"] == events[-1]["step"]]
            passing = [e["t"] for e in last if e["detail"].startswith(f"{kind}:")]
            at = passing[0] if passing else (events[-1]["t"] if events else end)
            first_line = next(iter(error["message"].splitlines()), "")
            what = f"raised {kind}: {first_line[:120]}"
            yield Failure(thread, at, what, **blame)
        elif outcome["state"] == "unfinished":
            yield Failure(thread, end, "had not ended at the deadline", **blame)
