"""Numbered packets between target workers and drafter workers.

Packet n goes to drafter n mod D; target t of T makes packets t, t+T, t+2T ... Both are fixed, so
what a drafter sees does not depend on which thread was faster. Each drafter takes its packets in
order and has at most ``depth`` of them waiting: a target that is ahead waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dflash.objective.anchors import Anchors
from dflash.schedule.stop import StoppableCondition, Stopper


@dataclass
class Packet:
    """One row's tokens and features on their way to a drafter.

    Attributes:
        number: counted from 0 over the whole run.
        epoch: of the data.
        row: the data's row (its tensors on the CPU).
        anchors: drawn for this row in this epoch, on the CPU.
        features: [1, S, K*H_t], on the drafter's device.
        ready: a CUDA event after which ``features`` may be read, or None.
        teacher: [1, S, H], the target's last hidden states there, or None.
        teacher_ready: as ``ready``.
    """

    number: int
    epoch: int
    row: Any
    anchors: Anchors
    features: Tensor
    ready: Any = None
    teacher: Tensor | None = None
    teacher_ready: Any = None

    @property
    def bytes(self) -> int:
        """Size of what travels between devices."""
        sent = [self.features] if self.teacher is None else [self.features, self.teacher]
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)


class Exchange:
    """See the module's docstring.

    Args:
        targets, drafters: numbers of workers.
        depth: packets that may wait for one drafter.
        first: number of the first packet (after a resume).
        end: number after the last packet of the run.
    """

    def __init__(
        self, *, targets: int, drafters: int, depth: int, first: int, end: int, stopper: Stopper
    ) -> None:
        if first % drafters:
            raise ValueError(
                f"first packet {first} is not at a step boundary of {drafters} drafters"
            )
        self._targets, self._drafters, self._depth = targets, drafters, depth
        self._first, self._end = first, end
        self._changed = StoppableCondition(stopper)
        self._waiting: dict[int, Packet] = {}
        self._next_made = [first + index for index in range(targets)]
        self._next_taken = [first + index for index in range(drafters)]

    def claim(self, target: int) -> int | None:
        """The number of the packet that this target makes next; None when its work is done.

        Waits while that packet's drafter has ``depth`` packets before it.
        """
        number = self._next_made[target]
        if number >= self._end:
            return None
        drafter = (number - self._first) % self._drafters
        with self._changed:
            self._changed.wait_until(
                lambda: number < self._next_taken[drafter] + self._depth * self._drafters
            )
        self._next_made[target] = number + self._targets
        return number

    def deliver(self, packet: Packet) -> None:
        """Hands a finished packet over; never waits (the wait was in :meth:`claim`)."""
        with self._changed:
            self._waiting[packet.number] = packet
            self._changed.notify_all()

    def take(self, drafter: int) -> Packet | None:
        """The drafter's next packet, waited for; None when there are no more."""
        number = self._next_taken[drafter]
        if number >= self._end:
            return None
        with self._changed:
            self._changed.wait_until(lambda: number in self._waiting)
            packet = self._waiting.pop(number)
            self._next_taken[drafter] = number + self._drafters
            self._changed.notify_all()
        return packet

    def depths(self) -> list[int]:
        """Packets waiting for each drafter now."""
        with self._changed:
            counts = [0] * self._drafters
            for number in self._waiting:
                counts[(number - self._first) % self._drafters] += 1
            return counts
