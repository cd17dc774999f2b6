"""Anchors: the positions at which a row's training blocks start.

Covers which positions may be anchors and a reproducible draw of a fixed number of slots. Not
covered: quotas for each document of a row (all candidates of the row are equally likely).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


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
    """Draw up to `slots` anchors from one row, uniformly and without replacement.

    Position p may be an anchor if it and p+1 are supervised and in one document: the block then
    has a label in slot 1. Blocks may overrun their document; labels stop at its end. Random
    anchors, drawn anew each epoch: DFlash, arXiv 2602.06036 (section on training).

    loss_mask: [S] bool. document_ids: [S] int, negative = padding.
    seed, epoch, sample: name the draw. Equal names give equal anchors in every process and
    thread, so that a resumed run draws what the broken one would have; `sample` is the row's
    number or key in the data.

    Returns N = `slots` slots on `loss_mask`'s device; a row without candidates has none valid.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    _check_row(loss_mask, document_ids)
    if slots < 1:
        raise ValueError(f"sample_anchors: slots must be at least 1, got {slots}")
    mask, documents = loss_mask.cpu(), document_ids.cpu()
    eligible = mask[:-1] & mask[1:] & (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    candidates = eligible.nonzero().squeeze(1)  # [C], ascending
    generator = torch.Generator().manual_seed(_stable_seed(seed, epoch, sample))
    order = torch.randperm(candidates.shape[0], generator=generator)
    chosen = candidates[order[:slots]].sort().values

    positions = torch.zeros(slots, dtype=torch.int64)
    positions[: chosen.shape[0]] = chosen
    valid = torch.arange(slots) < chosen.shape[0]
    return Anchors(positions, valid).to(loss_mask.device)


def _stable_seed(seed: int, epoch: int, sample: int | str) -> int:
    """Mix the name of a draw into 63 bits; `hash()` would differ from process to process."""
    # The kind is part of the name: sample 7 and sample "7" are different rows.
    key = f"s{sample}" if isinstance(sample, str) else f"i{int(sample)}"
    name = f"{int(seed)}/{int(epoch)}/{key}".encode()
    # torch's CPU generator uses the low 32 bits only; a hash spreads the name over those as well.
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1


def _check_row(loss_mask: Tensor, document_ids: Tensor) -> None:
    if loss_mask.dim() != 1 or loss_mask.shape != document_ids.shape:
        raise ValueError(
            f"sample_anchors: loss_mask and document_ids must both be [S], got "
            f"{tuple(loss_mask.shape)} and {tuple(document_ids.shape)}"
        )
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"sample_anchors: loss_mask must be bool, got {loss_mask.dtype}")
