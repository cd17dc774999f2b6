"""The drafter's context while decoding: keys and values of every layer, computed once.

Only committed positions enter (DFlash, arXiv 2602.06036, KV injection), so nothing is ever taken
out: a block's own keys and values are written behind the context and forgotten. Not covered:
sliding windows, rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ContextCache:
    """Keys and values [b, Hkv, length, D] of each layer, in buffers that double as they fill."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def append(self, new: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take in new positions: one (keys, values) pair [b, Hkv, new, D] for each layer."""
        if not self._layers:
            # Empty buffers of the right kind; the write below gives them their room.
            self._layers = [(k[:, :, :0], v[:, :, :0]) for k, v in new]
        for index, (k, v) in enumerate(new):
            self._write(index, k, v)
        self.length += new[0][0].shape[2]

    def joined(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Context followed by a block's k and v [b, Hkv, B, D]; views [b, Hkv, length+B, D].

        Valid until the next `append` or `joined` of that layer.
        """
        if not self._layers:
            raise ValueError("ContextCache: empty: a block needs a context, append it first")
        self._write(layer, k, v)
        end = self.length + k.shape[2]
        keys, values = self._layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        end = self.length + k.shape[2]
        if self._layers[layer][0].shape[2] < end:
            old_k, old_v = self._layers[layer]
            self._layers[layer] = (self._grown(old_k, 2 * end), self._grown(old_v, 2 * end))
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v

    def _grown(self, buffer: Tensor, room: int) -> Tensor:
        rows, heads, _, width = buffer.shape
        larger = torch.empty((rows, heads, room, width), dtype=buffer.dtype, device=buffer.device)
        larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger
