"""Anchors: the positions at which a row's training blocks start.

Covers which positions may be anchors, how a fixed number of slots is divided over the documents of
a row, and a reproducible draw in each document. Not covered: draws that look at the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.seeds import stable_seed


@dataclass(frozen=True, eq=False)
class Anchors:
    """N anchor slots of one row.

    positions: [N] int64; the valid ones first and ascending, then 0 for every unused slot.
    valid: [N] bool.
    """

    positions: Tensor
    valid: Tensor

    def __post_init__(self) -> None:
        if self.positions.dim() != 1 or self.positions.shape != self.valid.shape:
            raise ValueError(
                f"anchors: positions and valid must both be [N], got "
                f"{tuple(self.positions.shape)} and {tuple(self.valid.shape)}"
            )
        if self.positions.dtype != torch.int64 or self.valid.dtype != torch.bool:
            raise ValueError(
                f"anchors: positions must be int64 and valid bool, got "
                f"{self.positions.dtype} and {self.valid.dtype}"
            )

    @property
    def slots(self) -> int:
        """N, used or not."""
        return self.positions.shape[0]

    def to(self, device: torch.device | str) -> Anchors:
        """The same anchors on another device."""
        return Anchors(self.positions.to(device), self.valid.to(device))


def sample_anchors(
    loss_mask: Tensor,
    document_ids: Tensor,
    slots: int,
    *,
    seed: int,
    epoch: int,
    sample: int | str,
) -> Anchors:
    """Draw up to `slots` anchors from one row: each document its share, without replacement.

    Position p may be an anchor if it and p+1 are supervised and in one document: the block then
    has a label in slot 1. Blocks may overrun their document; labels stop at its end. Random
    anchors, drawn anew each epoch: DFlash, arXiv 2602.06036 (section on training).

    If there are more candidates than slots, every document gets one slot and the rest in
    proportion to its other candidates; if there are more documents than slots, some drawn
    documents get one each. In its document an anchor is drawn uniformly, and the draw is the
    document's own: neighbours in the row change how many are taken, never which come first.

    loss_mask: [S] bool. document_ids: [S] int, negative = padding.
    seed, epoch, sample: name the draw, together with the document's id. Equal names give equal
    anchors in every process and thread, so that a resumed run draws what the broken one would
    have; `sample` is the row's number or key in the data.

    Returns N = `slots` slots on `loss_mask`'s device; a row without candidates has none valid.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    _check_row(loss_mask, document_ids)
    if slots < 1:
        raise ValueError(f"sample_anchors: slots must be at least 1, got {slots}")
    mask, documents = loss_mask.cpu(), document_ids.cpu()
    eligible = mask[:-1] & mask[1:] & (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    candidates = eligible.nonzero().squeeze(1)  # [C], ascending
    # ids: [D] documents that have candidates; member: [C] index into ids
    ids, member, counts = torch.unique(
        documents[candidates], return_inverse=True, return_counts=True
    )
    name = (seed, epoch, sample)
    shares = _shares(counts.tolist(), slots, stable_seed(*name))
    drawn = [
        _draw(candidates[member == d], share, stable_seed(*name, document))
        for d, (document, share) in enumerate(zip(ids.tolist(), shares, strict=True))
    ]
    chosen = torch.cat([candidates[:0], *drawn]).sort().values

    positions = torch.zeros(slots, dtype=torch.int64)
    positions[: chosen.shape[0]] = chosen
    valid = torch.arange(slots) < chosen.shape[0]
    return Anchors(positions, valid).to(loss_mask.device)


def _draw(candidates: Tensor, share: int, seed: int) -> Tensor:
    """`share` of the candidates [C]; a greater share of the same draw holds the smaller."""
    if share == 0:
        return candidates[:0]
    generator = torch.Generator().manual_seed(seed)
    return candidates[torch.randperm(candidates.shape[0], generator=generator)[:share]]


def _shares(counts: list[int], slots: int, seed: int) -> list[int]:
    """Slots of each document; min(slots, sum(counts)) in all, none above its count (>= 1)."""
    total, documents = sum(counts), len(counts)
    if total <= slots:
        return counts
    if documents >= slots:
        lucky = _draw(torch.arange(documents), slots, seed).tolist()
        return [int(d in lucky) for d in range(documents)]
    # Largest remainder over the candidates beyond each document's first; integers, so exact.
    spare, others = slots - documents, total - documents
    parts = [divmod((count - 1) * spare, others) for count in counts]
    left = spare - sum(whole for whole, _ in parts)
    first = sorted(range(documents), key=lambda d: -parts[d][1])[:left]
    return [1 + whole + (d in first) for d, (whole, _) in enumerate(parts)]


def _check_row(loss_mask: Tensor, document_ids: Tensor) -> None:
    if loss_mask.dim() != 1 or loss_mask.shape != document_ids.shape:
        raise ValueError(
            f"sample_anchors: loss_mask and document_ids must both be [S], got "
            f"{tuple(loss_mask.shape)} and {tuple(document_ids.shape)}"
        )
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"sample_anchors: loss_mask must be bool, got {loss_mask.dtype}")
