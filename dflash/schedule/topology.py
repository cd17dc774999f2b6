"""Which role runs on which device.

``cuda:3`` is a device. ``cpu:3`` is a logical one: there is one CPU, and the number only says that
the role has a worker thread of its own. A device may carry several roles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.config import ScheduleSettings


@dataclass(frozen=True)
class Place:
    """One role on one device.

    Attributes:
        worker: the thread's name, ``target-0`` or ``drafter-2``.
        name: the device as the recipe writes it.
    """

    worker: str
    name: str

    @property
    def device(self) -> torch.device:
        """The torch device; every logical CPU device is ``cpu``."""
        kind, _, index = self.name.partition(":")
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, int(index or 0))


@dataclass(frozen=True)
class Topology:
    """All roles of a run, in their fixed order."""

    targets: tuple[Place, ...]
    drafters: tuple[Place, ...]

    @classmethod
    def of(cls, settings: ScheduleSettings) -> Topology:
        """The recipe's topology; nothing is looked up on the machine."""
        return cls(
            tuple(Place(f"target-{i}", name) for i, name in enumerate(settings.targets)),
            tuple(Place(f"drafter-{i}", name) for i, name in enumerate(settings.drafters)),
        )

    def missing(self) -> list[str]:
        """Devices that this machine does not have, as the recipe writes them."""
        count = torch.cuda.device_count()
        places = (*self.targets, *self.drafters)
        return sorted(
            {p.name for p in places if p.device.type == "cuda" and (p.device.index or 0) >= count}
        )

    def lines(self) -> list[str]:
        """For a person."""
        return [f"{place.worker} on {place.name}" for place in (*self.targets, *self.drafters)]
