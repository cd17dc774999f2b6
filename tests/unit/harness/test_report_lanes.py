"""Events become spans that nest, and spans become trace events that Perfetto opens."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_records import completed, crashed, event, hung, raised

from harness.points import POINTS
from harness.report.lanes import STAGES, timeline
from harness.report.trace_events import PROBES, THREADS, trace_events


def spans(record, thread):
    (lane,) = [lane for lane in timeline(record).lanes if lane.thread == thread]
    return {span.stage: (round(span.begin, 3), round(span.end, 3)) for span in lane.spans}


def test_pairs_of_events_are_spans_and_a_lock_taken_again_is_none():
    assert spans(completed(), "drafter-1") == {
        "step": (0.1, 0.7),
        "compiling": (0.11, 0.61),
        "lock": (0.12, 0.2),
        "dynamo": (0.2, 0.6),
        "trace": (0.3, 0.52),
        "flag": (0.31, 0.52),
    }
    assert spans(completed(), "drafter-0") == {
        "step": (0.4, 0.48),
        "held": (0.41, 0.46),
        "warm": (0.46, 0.47),
    }


def test_a_call_that_raised_and_one_that_ran_eager_are_told_apart():
    assert spans(raised(), "drafter-0")["raised"] == (0.46, 0.47)
    record = completed()
    record["watch"]["timeline"].insert(12, event(0.465, "drafter-0", "flex.eager", 3))
    assert spans(record, "drafter-0")["eager"] == (0.46, 0.47)


def test_a_backward_that_runs_is_a_span_and_one_that_is_traced_is_none():
    begin, end = (f"torch.autograd.graph:_engine_run_backward@{at}" for at in ("entry", "exit"))
    record = completed()
    timeline_of = record["watch"]["timeline"]
    timeline_of += [event(0.8, "drafter-1", begin), event(0.9, "drafter-1", end)]
    timeline_of.insert(7, event(0.315, "drafter-1", begin))
    timeline_of.insert(8, event(0.32, "drafter-1", end))
    (lane,) = [lane for lane in timeline(record).lanes if lane.thread == "drafter-1"]
    assert [(s.begin, s.end) for s in lane.spans if s.stage == "backward"] == [(0.8, 0.9)]


def test_the_moment_of_failure_is_the_first_word_of_the_error_in_the_last_step():
    record = raised()
    (failure,) = timeline(record).failures
    assert (failure.thread, failure.at) == ("drafter-0", 0.465)
    assert (failure.holder, failure.state) == ("drafter-1", "fx-tracing-flag")
    caught_before = event(0.2, "drafter-0", "call.settled", 2, "RuntimeError: another")
    record["watch"]["timeline"].insert(0, caught_before)
    assert timeline(record).failures[0].at == 0.465


def test_what_had_not_ended_says_so_and_what_died_does_not():
    (lane,) = [lane for lane in timeline(hung()).lanes if lane.thread == "drafter-1"]
    assert {s.stage for s in lane.spans if s.open} == {
        "step",
        "compiling",
        "dynamo",
        "trace",
        "flag",
    }
    assert {s.end for s in lane.spans if s.open} == {0.48}
    (lane,) = [lane for lane in timeline(raised()).lanes if lane.thread == "drafter-0"]
    assert not [span for span in lane.spans if span.open]
    assert [f.what for f in timeline(hung()).failures] == ["had not ended at the deadline"]


def test_a_record_without_events_has_no_timeline_and_an_empty_trace():
    assert timeline(crashed()) is None
    assert trace_events(crashed(), "x")["traceEvents"] == []


@pytest.mark.parametrize("make", [completed, raised, hung])
def test_trace_events_have_what_perfetto_needs(make):
    trace = json.loads(json.dumps(trace_events(make(), "a case")))
    assert trace["otherData"]["events dropped"] == "7"
    for one in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= one.keys()
        assert isinstance(one["ts"], int | float) and one["ts"] >= 0
        assert (one["pid"], type(one["tid"])) in {(THREADS, int), (PROBES, int)}
    named = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in trace["traceEvents"]
        if one["name"] == "thread_name"
    }
    assert {"drafter-0", "drafter-1", "fx-tracing-flag"} == set(named.values())
    used = {(one["pid"], one["tid"]) for one in trace["traceEvents"] if one["ph"] != "M"}
    assert used <= named.keys(), "an event on a track without a name"
    assert_slices_nest(trace["traceEvents"])
    assert_pairs_close(trace["traceEvents"])


def test_an_arrow_leads_from_the_holders_slice_to_the_victims():
    found = trace_events(raised(), "x")["traceEvents"]
    (start,), (finish,) = ([e for e in found if e["ph"] == ph] for ph in "sf")
    assert start["id"] == finish["id"] and start["tid"] != finish["tid"]
    for arrow in (start, finish):
        around = [
            e
            for e in found
            if e["ph"] == "X"
            and e["tid"] == arrow["tid"]
            and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
        ]
        assert around, "a flow event outside every slice is not drawn"


def assert_slices_nest(found):
    tracks = defaultdict(list)
    for one in found:
        if one["ph"] == "X":
            assert one["dur"] >= 0
            tracks[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for slices in tracks.values():
        open_until = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, "slices cross"
            open_until.append(end)


def assert_pairs_close(found):
    depth = defaultdict(int)
    for one in sorted(found, key=lambda e: e["ts"]):
        if one["ph"] in "be":
            depth[one["id"]] += 1 if one["ph"] == "b" else -1
            assert depth[one["id"]] in (0, 1)
    assert not any(depth.values())


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(sorted(POINTS)), st.booleans()),
        max_size=60,
    )
)
def test_whatever_the_events_are_spans_nest(steps):
    """Torn records too: ends without a begin, begins without an end, errors anywhere."""
    found = [
        event(index / 100, thread, what, index % 3, "KeyError: 'x'" if failed else "")
        for index, (thread, what, failed) in enumerate(steps)
    ]
    error = {"type": "KeyError", "message": "", "frames": []}
    record = {
        "outcomes": [
            {"thread": "a", "state": "raised", "error": error, "stack": []},
            {"thread": "b", "state": "unfinished", "error": None, "stack": []},
        ],
        "watch": {"timeline": found},
    }
    trace = trace_events(record, "x")["traceEvents"]
    assert_slices_nest(trace)
    assert_pairs_close(trace)


def test_every_stage_has_its_colour_in_the_page():
    from harness.report.html import _TEMPLATES

    style = (_TEMPLATES / "race.css").read_text()
    assert not [name for name in STAGES if f".s-{name} {{ --s:" not in style]
