"""Labels of block slots: slot k of the block anchored at a predicts the token at a+k, unshifted.

Covers hard labels from the row's own tokens. The target's distribution is mixed in by `chunked`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.objective.anchors import Anchors


def block_labels(
    input_ids: Tensor,
    loss_mask: Tensor,
    document_ids: Tensor,
    anchors: Anchors,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Labels [N, B] int64 and which of them count [N, B] bool.

    Slot k counts if its block is valid, k >= 1 (slot 0 holds the anchor's real token), a+k is in
    the row and in the anchor's document, and that token is supervised: DFlash, arXiv 2602.06036
    (training section). Labels that do not count are 0.

    input_ids, loss_mask (bool), document_ids (negative = padding): [S] each.
    """
    length = input_ids.shape[0]
    slot = torch.arange(block_size, device=input_ids.device)
    where = anchors.positions[:, None] + slot  # [N, B] position in the row
    inside = where < length
    where = where.clamp(max=length - 1)
    document = document_ids[anchors.positions][:, None]
    counts = anchors.valid[:, None] & (slot >= 1) & inside
    counts &= (document_ids[where] == document) & (document >= 0) & loss_mask[where]
    return torch.where(counts, input_ids[where], 0), counts
