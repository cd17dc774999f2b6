"""The block loss: cross-entropy with weights that decay from slot to slot, as sums.

A mean over this call's tokens would weight drafters, micro-steps and nodes wrongly wherever they
hold different numbers of tokens; so only sums leave here, and the one who has all of them divides.

Covers hard labels and fixed decay, on logits that exist as a whole: the reference that ``chunked``,
which training uses, has to equal. D-PACE is in ``dpace``. Not covered: distillation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_PAPER_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over the slots that count; 0-d tensors.

    numerator: sum of weight * cross-entropy (nats), with gradient: back-propagate this.
    denominator: sum of weights. loss = numerator / denominator, after pooling both.
    unweighted_numerator: sum of cross-entropy, without gradient.
    count: number of slots, int64. unweighted loss = unweighted_numerator / count.
    """

    numerator: Tensor
    denominator: Tensor
    unweighted_numerator: Tensor
    count: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.numerator + other.numerator,
            self.denominator + other.denominator,
            self.unweighted_numerator + other.unweighted_numerator,
            self.count + other.count,
        )


def paper_gamma(block_size: int) -> float:
    """Decay constant, in slots, that the paper gives for a block size: 8: 4, 10: 5, 16: 7.

    Raises ValueError for other sizes, for which it gives none.
    """
    if block_size not in _PAPER_GAMMA:
        raise ValueError(
            f"the paper has no gamma for block_size={block_size} (only for "
            f"{sorted(_PAPER_GAMMA)}): give one, or uniform weights"
        )
    return _PAPER_GAMMA[block_size]


def decay_weights(block_size: int, gamma: float | Literal["paper"] | None = "paper") -> Tensor:
    """Slot weights [B] fp32: w_0 = 0, w_k = exp(-(k-1) / gamma); gamma None = 1 for all k >= 1.

    Source: DFlash, arXiv 2602.06036 (training section). "paper" takes `paper_gamma`.
    """
    if gamma == "paper":
        gamma = paper_gamma(block_size)
    if gamma is not None and not gamma > 0:
        raise ValueError(f"decay_weights: gamma must be above 0 (or None), got {gamma}")
    slot = torch.arange(block_size, dtype=torch.float32)
    weights = torch.ones(block_size) if gamma is None else torch.exp((1.0 - slot) / gamma)
    weights[0] = 0.0
    return weights


def decayed_cross_entropy(
    logits: Tensor, labels: Tensor, mask: Tensor, weights: Tensor
) -> LossSums:
    """Sum of weights[k] * -log softmax(logits[n, k])[labels[n, k]] over the slots in `mask`.

    logits: [N, B, V]; computed in fp32 (or fp64 if given so). labels: [N, B] int64, any value
    outside `mask`. mask: [N, B] bool. weights: [B], see `decay_weights`.

    Slots outside `mask` contribute nothing to value or gradient, even if their logits are NaN.
    Raises ValueError where the shapes do not fit.
    """
    if logits.shape[:2] != labels.shape or mask.shape != labels.shape:
        raise ValueError(
            f"decayed_cross_entropy: logits [N, B, V], labels [N, B] and mask [N, B] do not fit: "
            f"{tuple(logits.shape)}, {tuple(labels.shape)}, {tuple(mask.shape)}"
        )
    if weights.shape != labels.shape[1:]:
        raise ValueError(
            f"decayed_cross_entropy: weights must be [B] = [{labels.shape[1]}], "
            f"got {tuple(weights.shape)}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Filled before the softmax: a NaN that is only multiplied by 0 later would stay a NaN, in the
    # value or in the gradient.
    wide = wide.masked_fill(~mask[..., None], 0.0)
    safe_labels = labels.masked_fill(~mask, 0)
    each = F.cross_entropy(wide.flatten(0, 1), safe_labels.flatten(), reduction="none")
    each = each.view_as(mask)  # [N, B] nats
    slot_weights = weights.to(wide) * mask  # [N, B]
    return LossSums(
        numerator=(each * slot_weights).sum(),
        denominator=slot_weights.sum(),
        unweighted_numerator=(each.detach() * mask).sum(),
        count=mask.sum(),
    )
