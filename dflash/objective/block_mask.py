"""The attention mask of a row of blocks, dense (the reference) and as a flex BlockMask (fast).

The rule (DFlash, arXiv 2602.06036, training section): a slot of the block anchored at a sees the
context positions p < a of its own document, strictly, because the target's feature at a does not
exist yet when the drafter runs; and all slots of its own block, by block number, in both
directions. A slot of an invalid block sees its own block only, so that no softmax is empty.

Covers one row, full attention. Not covered: sliding windows and causal blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.objective.anchors import Anchors


def dense_mask(anchors: Anchors, document_ids: Tensor, block_size: int) -> Tensor:
    """The rule written out: [N*B, S+N*B] bool, True where the query sees the key.

    document_ids: [S] int, negative = padding. For tests and for SDPA; costs N*B*(S+N*B) bytes.
    """
    device = document_ids.device
    at = torch.arange(document_ids.shape[0], device=device)
    before = at < anchors.positions[:, None]  # [N, S]
    same = document_ids == document_ids[anchors.positions][:, None]
    context = before & same & (document_ids >= 0) & anchors.valid[:, None]
    block = torch.arange(anchors.slots, device=device).repeat_interleave(block_size)  # [N*B]
    own = block[:, None] == block
    return torch.cat((context.repeat_interleave(block_size, dim=0), own), dim=1)


def flex_block_mask(
    anchors: Anchors,
    document_ids: Tensor,
    block_size: int,
    tile: int = 128,
    *,
    device: torch.device | str | None = None,
) -> BlockMask:
    """The same mask for `flex_attention`, [1, 1, N*B, S+N*B], from intervals, without a scan.

    Every query row sees two key intervals, [start of its document, a) and its block, so the tiles
    that are touched or filled follow by comparison; `create_block_mask` would evaluate all
    N*B*(S+N*B) pairs. The mask function is always the same code over tensors of the same shapes,
    so new anchors do not recompile a compiled `flex_attention`.

    document_ids: [S] int, negative = padding; each document must be one run of the row.
    tile: edge of the sparse tiles; a multiple of the kernels' own tiles.
    device: where the mask is used; None = where `document_ids` is. Build from CPU tensors and
    name the device: building on a GPU waits for it, and `BlockMask.to` leaves the tensors of the
    mask function behind.

    Raises ValueError where a document is in several pieces.
    """
    _check_contiguous(document_ids)
    rows = _key_intervals(anchors, document_ids, block_size)
    queries = anchors.slots * block_size
    keys = document_ids.shape[0] + queries

    touched, filled = _tiles(rows, keys, tile)
    target = document_ids.device if device is None else torch.device(device)
    partial, full = (touched & ~filled).to(target), filled.to(target)
    # BlockMask's own helper for these lists runs inside torch.fx.traceback.annotate, which writes
    # to a dict shared by all threads: a mask built in one thread would mark the graph nodes that
    # another thread traces meanwhile as "fall back to eager". So the lists are made here.
    kv_num, kv_index = _ordered(partial)
    full_kv_num, full_kv_index = _ordered(full)
    q_num, q_index = _ordered(partial.T)
    full_q_num, full_q_index = _ordered(full.T)
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=kv_num,
        kv_indices=kv_index,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv_index,
        q_num_blocks=q_num,
        q_indices=q_index,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_index,
        BLOCK_SIZE=(tile, tile),
        mask_mod=_mask_function(*(bound.to(target) for bound in rows)),
    )


class _KeyIntervals(NamedTuple):
    """The half-open key intervals that each query row sees, [N*B] int32 each.

    Context [low, high), empty as [0, 0); own block [own_low, own_high). They never touch: the
    context ends before an anchor, and every anchor is before the first block key.
    """

    low: Tensor
    high: Tensor
    own_low: Tensor
    own_high: Tensor


def _key_intervals(anchors: Anchors, document_ids: Tensor, block_size: int) -> _KeyIntervals:
    length = document_ids.shape[0]
    at = torch.arange(length, device=document_ids.device)
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[1:] = document_ids[1:] != document_ids[:-1]
    start = torch.where(first, at, 0).cummax(0).values  # [S] start of the run around p

    a = anchors.positions
    sees_context = anchors.valid & (document_ids[a] >= 0)
    low = torch.where(sees_context, start[a], 0)
    high = torch.where(sees_context, a, 0)
    own_low = length + block_size * torch.arange(anchors.slots, device=document_ids.device)
    per_block = (low, high, own_low, own_low + block_size)
    # int32 like the kernels' own indices.
    return _KeyIntervals(*(x.to(torch.int32).repeat_interleave(block_size) for x in per_block))


def _tiles(rows: _KeyIntervals, keys: int, tile: int) -> tuple[Tensor, Tensor]:
    """Which [query tile, key tile] pairs are touched, and which are filled to the last element.

    A tile that hangs over the end of the queries or keys is never filled, as in torch's masks.
    """
    queries = rows.low.shape[0]
    begin = torch.arange(0, keys, tile, device=rows.low.device)  # [key tiles]
    end = begin + tile
    touched = torch.zeros(queries, begin.shape[0], dtype=torch.bool, device=begin.device)
    filled = torch.zeros_like(touched)
    for low, high in ((rows.low, rows.high), (rows.own_low, rows.own_high)):
        low, high = low[:, None], high[:, None]
        touched |= (low < end) & (high > begin) & (low < high)
        filled |= (low <= begin) & (high >= end)
    overhang = (0, 0, 0, -queries % tile)
    by_tile = (-1, tile, begin.shape[0])
    return (
        F.pad(touched, overhang).view(by_tile).any(dim=1),
        F.pad(filled, overhang).view(by_tile).all(dim=1),
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] bool -> (count [1, 1, rows], column numbers [1, 1, rows, columns]) int32.

    The first `count` numbers of a row are its True columns in ascending order.
    """
    as_int = tiles.to(torch.int32)
    count = as_int.sum(dim=-1, dtype=torch.int32)
    columns = as_int.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], columns.contiguous()[None, None]


def _mask_function(
    low: Tensor, high: Tensor, own_low: Tensor, own_high: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The flex mask function of a row; captures tensors only, since a captured int recompiles."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        context = (kv >= low[q]) & (kv < high[q])
        own = (kv >= own_low[q]) & (kv < own_high[q])
        return context | own

    return sees


def _check_contiguous(document_ids: Tensor) -> None:
    runs = torch.unique_consecutive(document_ids)
    ids, count = runs[runs >= 0].unique(return_counts=True)
    if (count > 1).any():
        raise ValueError(
            f"flex_block_mask: document {int(ids[count > 1][0])} is in {int(count.max())} pieces "
            f"of the row: pack every document as one run"
        )
