"""D-PACE weights: a slot counts as much as its being right would lengthen the accepted run.

Source: D-PACE, arXiv 2605.18810. With q_k = exp(-CE_k), the drafter's probability of the label,
and alpha in (0, 1]:

    s_k = (1 - alpha) * q_k + alpha     (1 where the slot does not count)
    P_k = s_1 * ... * s_k               smoothed probability that slots 1..k are all accepted
    w_k = sum over m >= k of P_m        over the slots m that count

so that early slots weigh most, and late ones the more, the better the block already is. The
weights are constants: no gradient flows through them. alpha near 0 lets one bad slot silence all
later ones; alpha = 1 gives the number of slots from k on.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def dpace_weights(ce: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Weights [N, B], 0 outside ``mask``, in ``ce``'s dtype.

    ce: [N, B] cross-entropies in nats, any value outside ``mask``. mask: [N, B] bool.
    Raises ValueError for alpha outside (0, 1] and shapes that differ.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"dpace_weights: alpha must be in (0, 1], got {alpha}")
    if ce.shape != mask.shape:
        raise ValueError(
            f"dpace_weights: ce and mask must have one shape, got {tuple(ce.shape)} and "
            f"{tuple(mask.shape)}"
        )
    smoothed = torch.where(mask, (1 - alpha) * torch.exp(-ce) + alpha, 1.0)  # s_k
    run = smoothed.cumprod(dim=1).masked_fill(~mask, 0.0)  # P_k of the slots that count
    return run.flip(1).cumsum(dim=1).flip(1).masked_fill(~mask, 0.0)
