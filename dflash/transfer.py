"""Tensors on their way between devices: pinned memory, side streams, events.

On CUDA nothing here waits on the host. Small inputs go through pinned memory, so that the copy to
the GPU overlaps with whatever runs there. Features go from a target's GPU to a drafter's on a pair
of side streams: on the main streams the copy would wait for all that the drafter has queued, and
the target's next forward for the copy. On the CPU both are plain moves, or nothing.

No GPU was there when this was written; the order of calls is tested with recorded streams.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_streams = threading.local()  # each worker its own: two workers' copies do not queue


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; from the CPU to a GPU through pinned memory, without waiting."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def send(features: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """``features`` on ``device``, and the event after which they may be read there (CUDA only).

    The reader makes its stream wait for the event: see :func:`receive`.
    """
    if features.device.type != "cuda":
        return to_device(features, device), None
    source = features.device
    event = torch.cuda.Event()
    if source == device:
        event.record(torch.cuda.current_stream(source))
        return features, event
    leaving = _side_stream(source)
    leaving.wait_stream(torch.cuda.current_stream(source))  # until they are computed
    with torch.cuda.stream(leaving):
        if device.type != "cuda":
            moved = features.to(device)
            event.record(leaving)
        else:
            arriving = _side_stream(device)
            with torch.cuda.stream(arriving):
                moved = features.to(device, non_blocking=True)
            # The copy runs on the source's stream, and the arriving one is made to wait for it.
            event.record(arriving)
    features.record_stream(leaving)  # not to be given away before the copy has read them
    return moved, event


def receive(features: Tensor, ready: Any, device: torch.device) -> Tensor:
    """``features`` for the current stream of ``device``, once ``ready`` has happened there."""
    if ready is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        stream.wait_event(ready)
        features.record_stream(stream)  # they came from another stream's pool
    elif ready is not None:
        ready.synchronize()
    return features


def _side_stream(device: torch.device) -> Any:
    known = _streams.__dict__.setdefault("by_device", {})
    if device not in known:
        known[device] = torch.cuda.Stream(device)
    return known[device]
