"""All drafters' gradients become one: summed in a fixed order, stepped once, sent back to all.

Numerators travel: every drafter back-propagates sums, and the sum of all gradients is divided by
the pooled denominator. The order of the sum is the drafters' order, whoever arrives first, so the
result does not depend on timing. The last to arrive does the work while the others wait, so no
optimizer step overlaps a compile in a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.schedule.stop import StoppableCondition, Stopper

Step = Callable[[list[Tensor], list[Any]], None]


class Reducer:
    """A rendezvous of all drafters at the end of each step.

    Args:
        replicas: one list of parameters per drafter, in the same order; the first is the master.
        step: called with the summed gradients (on the master's device) and the drafters' sums in
            order; it divides, clips and steps the master's parameters.
    """

    def __init__(self, replicas: Sequence[Sequence[Tensor]], step: Step, stopper: Stopper) -> None:
        self._replicas = replicas
        self._step = step
        self._changed = StoppableCondition(stopper)
        self._given: dict[int, Any] = {}
        self._round = 0

    def meet(self, drafter: int, sums: Any) -> None:
        """Gives this drafter's gradients and sums; returns when its parameters are the new ones.

        Raises:
            Stopped: the run is being ended.
        """
        with self._changed:
            mine = self._round
            self._given[drafter] = sums
            if len(self._given) < len(self._replicas):
                self._changed.wait_until(lambda: self._round != mine)
                return
        # Without the condition: whoever ends the run wakes its waiters, also while a step hangs.
        self._reduce()
        with self._changed:
            self._given.clear()
            self._round += 1
            self._changed.notify_all()

    def _reduce(self) -> None:
        total = reduce_into_master(self._replicas)
        self._step(total, [self._given[index] for index in range(len(self._replicas))])
        spread_master(self._replicas)


@torch.no_grad()
def reduce_into_master(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of all replicas' gradients, in their order, on the master's device."""
    total = [_gradient(parameter).clone() for parameter in replicas[0]]
    for replica in replicas[1:]:
        for whole, parameter in zip(total, replica, strict=True):
            whole.add_(_gradient(parameter).to(whole.device))
    return total


@torch.no_grad()
def spread_master(replicas: Sequence[Sequence[Tensor]]) -> None:
    """The master's parameters to all replicas; gradients are gone afterwards."""
    for replica in replicas:
        for parameter, new in zip(replica, replicas[0], strict=True):
            if parameter is not new:
                parameter.copy_(new)
            parameter.grad = None


def _gradient(parameter: Tensor) -> Tensor:
    # A drafter whose packets had no valid anchor has touched nothing.
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
