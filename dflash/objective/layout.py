"""Block layout: which token and which position stands in every slot of a row's blocks.

Queries are N*B slots, block after block; keys are the S context positions, then the same slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.objective.anchors import Anchors


def block_token_ids(
    input_ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int
) -> Tensor:
    """Token ids of all slots: the anchor's token, then B-1 masks; invalid blocks all masks.

    input_ids: [S] int64. Returns [N*B] int64.
    """
    ids = input_ids.new_full((anchors.slots, block_size), mask_token_id)
    ids[:, 0] = torch.where(anchors.valid, input_ids[anchors.positions], mask_token_id)
    return ids.flatten()


def positions(position_ids: Tensor, anchors: Anchors, block_size: int) -> Tensor:
    """Rotary positions of all keys: the context's own, then anchor's position + slot.

    position_ids: [S] int64, restarting at every document of the row. Returns [S+N*B] int64.
    """
    steps = torch.arange(block_size, device=position_ids.device, dtype=position_ids.dtype)
    slots = position_ids[anchors.positions][:, None] + steps  # [N, B]
    return torch.cat((position_ids, slots.flatten()))
