"""Packets arrive in order whoever is faster; gradients are summed in order whoever comes first."""

from __future__ import annotations

import threading

import pytest
import torch

from dflash.objective import Anchors
from dflash.schedule import Exchange, Packet, Reducer, Stopped, Stopper

DEADLINE = 30.0


def packet(number: int) -> Packet:
    anchors = Anchors(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    return Packet(number, 0, None, anchors, torch.zeros(1))


def run_all(*bodies):
    """Runs each in a thread; returns what they returned or raised, by position."""
    results = [None] * len(bodies)

    def body(index, function):
        try:
            results[index] = function()
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=body, args=(i, f), daemon=True) for i, f in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def make(exchange: Exchange, target: int) -> list[int]:
    made = []
    while (number := exchange.claim(target)) is not None:
        exchange.deliver(packet(number))
        made.append(number)
    return made


def take(exchange: Exchange, drafter: int) -> list[int]:
    taken = []
    while (got := exchange.take(drafter)) is not None:
        taken.append(got.number)
    return taken


@pytest.mark.parametrize(
    ("targets", "drafters", "depth"), [(5, 3, 1), (5, 3, 2), (1, 3, 1), (3, 1, 2)]
)
def test_each_worker_gets_its_own_numbers_in_order(targets, drafters, depth):
    first, end = 2 * drafters, 14 * drafters
    exchange = Exchange(
        targets=targets, drafters=drafters, depth=depth, first=first, end=end, stopper=Stopper()
    )
    results = run_all(
        *(lambda t=t: make(exchange, t) for t in range(targets)),
        *(lambda d=d: take(exchange, d) for d in range(drafters)),
    )
    for target in range(targets):
        assert results[target] == list(range(first + target, end, targets))
    for drafter in range(drafters):
        assert results[targets + drafter] == list(range(first + drafter, end, drafters))


def test_a_target_that_is_ahead_waits():
    """Back-pressure: with depth 1 and nobody taking, one packet per drafter and no more."""
    stopper = Stopper()
    exchange = Exchange(targets=1, drafters=2, depth=1, first=0, end=100, stopper=stopper)
    assert [exchange.claim(0), exchange.claim(0)] == [0, 1]
    exchange.deliver(packet(0))
    exchange.deliver(packet(1))
    assert exchange.depths() == [1, 1]
    outcome = {}

    def third():
        outcome["number"] = exchange.claim(0)

    thread = threading.Thread(target=third, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "packet 2 was claimed although drafter 0 has one waiting"
    assert exchange.take(0).number == 0
    thread.join(DEADLINE)
    assert outcome == {"number": 2}


def test_stopping_wakes_everybody():
    stopper = Stopper()
    exchange = Exchange(targets=1, drafters=1, depth=1, first=0, end=9, stopper=stopper)
    reducer = Reducer([[torch.zeros(1)], [torch.zeros(1)]], lambda g, s: None, stopper)
    results = run_all(
        lambda: exchange.take(0),
        lambda: reducer.meet(0, None),
        lambda: stopper.stop("enough"),
    )
    assert isinstance(results[0], Stopped) and isinstance(results[1], Stopped)
    assert stopper.reason == "enough"
    assert stopper.stop("again") is False and stopper.reason == "enough", "the first reason stays"
    with pytest.raises(Stopped):
        exchange.take(0)


def test_a_start_between_two_steps_is_refused():
    with pytest.raises(ValueError, match="not at a step boundary"):
        Exchange(targets=1, drafters=3, depth=1, first=4, end=9, stopper=Stopper())


class Arrivals(dict):
    """What the drafters have given, in the order in which they came; each is announced."""

    def __init__(self, drafters):
        super().__init__()
        self.there = [threading.Event() for _ in drafters]

    def __setitem__(self, drafter, sums):
        super().__setitem__(drafter, sums)
        self.there[drafter].set()


def reduce_in(order: list[int]) -> torch.Tensor:
    """Three replicas whose gradients do not add up exactly; arrival is forced into ``order``."""
    values = [1e8, 1.0, -1e8]
    replicas = [[torch.zeros(1)] for _ in values]
    for replica, value in zip(replicas, values, strict=True):
        replica[0].grad = torch.tensor([value])
    seen = []

    def step(gradients, sums):
        seen.append((gradients[0].clone(), sums, list(reducer._given)))
        replicas[0][0].sub_(gradients[0])

    reducer = Reducer(replicas, step, Stopper())
    arrivals = reducer._given = Arrivals(order)

    def meet(place):
        if place:
            arrivals.there[order[place - 1]].wait(DEADLINE)
        reducer.meet(order[place], f"sums {order[place]}")

    run_all(*(lambda p=p: meet(p) for p in range(len(order))))
    ((gradient, sums, came),) = seen
    assert came == order, "control: they came in this order"
    assert sums == ["sums 0", "sums 1", "sums 2"], "sums in the drafters' order"
    assert all(torch.equal(r[0], replicas[0][0]) for r in replicas), "all have the new parameters"
    assert all(r[0].grad is None for r in replicas)
    return gradient


def test_the_sum_does_not_depend_on_who_comes_first():
    """(1e8 + 1) - 1e8 is not 1e8 - 1e8 + 1 in float32: only a fixed order gives one result."""
    orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]]
    results = {float(reduce_in(order)) for order in orders}
    assert results == {float(torch.tensor(1e8) + 1.0 - 1e8)}


def test_a_replica_without_gradients_counts_as_zero():
    replicas = [[torch.zeros(2)], [torch.zeros(2)]]
    replicas[1][0].grad = torch.ones(2)
    got = []
    reducer = Reducer(replicas, lambda g, s: got.append(g[0]), Stopper())
    run_all(lambda: reducer.meet(0, None), lambda: reducer.meet(1, None))
    assert torch.equal(got[0], torch.ones(2))


def test_a_step_that_hangs_does_not_keep_the_run_from_being_ended():
    """The stall of a step is found by another thread, whose stop() must wake those who wait."""
    stopper, inside, go_on = Stopper(), threading.Event(), threading.Event()
    let_go = []

    def hangs(gradients, sums):
        inside.set()
        let_go.append(go_on.wait(DEADLINE / 3))

    def stop():
        assert inside.wait(DEADLINE)
        stopper.stop("the step hangs")
        go_on.set()  # only reached if stop() came back

    reducer = Reducer([[torch.zeros(1)], [torch.zeros(1)]], hangs, stopper)
    first, second, _ = run_all(lambda: reducer.meet(0, None), lambda: reducer.meet(1, None), stop)
    assert let_go == [True], "stop() waited for the step"
    assert isinstance(first, Stopped) != isinstance(second, Stopped), "who waited was not woken"
