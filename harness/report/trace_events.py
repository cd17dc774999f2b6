"""The timeline as trace-event JSON, which Perfetto and ``chrome://tracing`` open.

Threads are complete events (``X``) that nest; probes are instants; the time in which a thread held
FX's tracing flag is an asynchronous event per thread, because two such times may overlap, and that
overlap is the race; a flow arrow leads from the holder to the victim. Times are microseconds.

Thread ids are ranks in the report, not the kernel's: the record keeps names only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.report.lanes import STAGES, Failure, Lane, Span, Timeline, timeline

THREADS, PROBES = 1, 2  # process ids, so that the two are groups of their own


def trace_events(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The JSON object of one case; without events when nothing was recorded."""
    drawn = timeline(record)
    events = [] if drawn is None else list(_events(drawn))
    facts = {key: str(record[key]) for key in ("torch", "python") if key in record}
    facts |= {"case": name, "events dropped": str(drawn.dropped if drawn else 0)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _events(drawn: Timeline) -> Iterator[dict[str, Any]]:
    for process, label in ((THREADS, "threads"), (PROBES, "probes (sampled)")):
        yield _meta("process_name", process, 0, name=label)
        yield _meta("process_sort_index", process, 0, sort_index=process)
    tids = {lane.thread: tid for tid, lane in enumerate(drawn.lanes, start=1)}
    for lane in drawn.lanes:
        tid = tids[lane.thread]
        yield _meta("thread_name", THREADS, tid, name=lane.thread)
        yield _meta("thread_sort_index", THREADS, tid, sort_index=tid)
        for span in lane.spans:
            yield _complete(span, tid)
        yield from _flag_windows(lane, tid)
    for tid, (probe, seen) in enumerate(drawn.probes.items(), start=1):
        yield _meta("thread_name", PROBES, tid, name=probe)
        for sighting in seen:
            yield _instant(f"{probe} not at rest", PROBES, tid, sighting.at, value=sighting.value)
    for number, failure in enumerate(drawn.failures, start=1):
        yield from _failure(failure, number, tids)


def _meta(what: str, process: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": values}


def _complete(span: Span, tid: int) -> dict[str, Any]:
    begin, end = _us(span.begin), _us(span.end)
    arguments: dict[str, Any] = {} if span.step is None else {"step": span.step}
    if span.open:
        arguments["open"] = "had not ended when the record did"
    return {
        "ph": "X",
        "name": STAGES[span.stage].says,
        "cat": span.stage,
        "pid": THREADS,
        "tid": tid,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": arguments,
    }


def _flag_windows(lane: Lane, tid: int) -> Iterator[dict[str, Any]]:
    """Outermost spans only: a trace inside a trace holds the flag that is up already."""
    until = float("-inf")
    for span in lane.spans:
        if span.stage == "flag" and span.begin >= until:
            until = span.end
            common = {
                "name": f"flag up in {lane.thread}",
                "cat": "state",
                "id": tid,
                "pid": THREADS,
                "tid": tid,
            }
            yield {"ph": "b", "ts": _us(span.begin), **common}
            yield {"ph": "e", "ts": _us(span.end), **common}


def _instant(name: str, process: int, tid: int, at: float, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": name,
        "pid": process,
        "tid": tid,
        "ts": _us(at),
        "args": arguments,
    }


def _failure(failure: Failure, number: int, tids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    victim, holder = tids[failure.thread], tids.get(failure.holder)
    at = failure.at
    yield _instant(f"{failure.thread} {failure.what}", THREADS, victim, at) | {"s": "g"}
    if holder is None:
        return
    common = {"name": failure.state, "cat": "culprit", "id": number, "pid": THREADS, "ts": _us(at)}
    yield {"ph": "s", "tid": holder, **common}
    yield {"ph": "f", "bp": "e", "tid": victim, **common}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
