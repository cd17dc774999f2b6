"""The bounded search tries every schedule within its bound, each once, the promising ones first.

On threads that are simulated: a list of points each, no locks. So all schedules can be enumerated
beside the search, and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.search_order import FewestFirst
from harness.strategies import Choice, Preemptions

Threads = dict[str, list[str]]
Trace = tuple[tuple[str, str], ...]


def run(threads: Threads, deviations: dict[int, str]) -> tuple[Trace, list[dict[str, Any]]]:
    """What :class:`harness.control.Control` would pass and decide."""
    strategy = Preemptions(deviations)
    left = {name: [*points, "end"] for name, points in threads.items()}
    trace, decisions = [], []
    current, at = None, None
    while options := tuple(name for name in threads if left[name]):
        chosen = strategy.choose(Choice(len(decisions), current, options))
        decisions.append({"options": options, "current": current, "at": at, "chosen": chosen})
        point = left[chosen].pop(0)
        trace.append((chosen, point))
        current, at = (None, None) if point == "end" else (chosen, point)
    assert strategy.missed() is None
    return tuple(trace), decisions


def search(threads: Threads, bound: int) -> Iterator[tuple[dict[int, str], Trace]]:
    found = FewestFirst(bound)
    for spec in found:
        deviations = {int(number): name for number, name in spec["deviations"].items()}
        trace, decisions = run(threads, deviations)
        yield deviations, trace
        found.learn(spec, {"schedule": {"decisions": decisions}})
    assert found.waiting() == 0


def every_schedule(threads: Threads, bound: int) -> Iterator[Trace]:
    """All of them, by going through all choices."""

    def go_on(
        left: dict[str, list[str]], current: str | None, used: int, trace: Trace
    ) -> Iterator[Trace]:
        options = [name for name in threads if left[name]]
        if not options:
            yield trace
        for chosen in options:
            cost = used + (current is not None and chosen != current)
            if cost > bound:
                continue
            point, *rest = left[chosen]
            now = None if point == "end" else chosen
            yield from go_on(left | {chosen: rest}, now, cost, (*trace, (chosen, point)))

    yield from go_on({name: [*points, "end"] for name, points in threads.items()}, None, 0, ())


THREE: Threads = {"a": ["call.arrive", "trace.body"], "b": ["x", "x", "trace.left"], "c": ["y"]}


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_every_schedule_within_the_bound_is_tried_once(bound: int) -> None:
    tried = [trace for _, trace in search(THREE, bound)]
    assert len(set(tried)) == len(tried)
    assert set(tried) == set(every_schedule(THREE, bound))


def preemptions(threads: Threads, deviations: dict[int, str]) -> list[str]:
    """The points at which the deviations preempt."""
    _, decisions = run(threads, deviations)
    return [decisions[n]["at"] for n in sorted(deviations) if decisions[n]["current"] is not None]


def test_fewer_preemptions_come_first_and_among_them_those_where_state_is_written() -> None:
    threads: Threads = {"a": ["call.arrive", "x", "x", "trace.body", "call.exit"], "b": ["y"]}
    order = [preemptions(threads, deviations) for deviations, _ in search(threads, 2)]
    assert [len(points) for points in order] == sorted(len(points) for points in order)
    single = [points[0] for points in order if len(points) == 1]
    assert single[0] == "trace.body"


def test_a_first_arrival_at_a_point_comes_before_later_ones() -> None:
    threads: Threads = {"a": ["x", "x", "x", "z"], "b": []}
    single = [
        preemptions(threads, deviations)
        for deviations, _ in search(threads, 1)
        if preemptions(threads, deviations)
    ]
    assert single == [["x"], ["z"], ["x"], ["x"]]
