"""RMSNorm with a plain gain `w` (never `1 + w`), computed in fp32 whatever the input's dtype.

Not covered: the target's own norms, whose convention differs by family.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps) over the last dimension; [..., size] -> [..., size].

    The result has the input's dtype. Weights are kept in fp32 by the trainer: in pure bf16 the
    steps of a gain near 1.0 round to nothing.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
