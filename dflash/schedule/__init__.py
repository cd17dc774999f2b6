"""Who runs where, how packets travel, how gradients meet, and who notices what goes wrong."""

from dflash.schedule.exchange import Exchange, Packet
from dflash.schedule.reduction import Reducer
from dflash.schedule.stop import Stopped, Stopper
from dflash.schedule.topology import Place, Topology
from dflash.schedule.worker import Clock, Worker

__all__ = [
    "Clock",
    "Exchange",
    "Packet",
    "Place",
    "Reducer",
    "Stopped",
    "Stopper",
    "Topology",
    "Worker",
]
