"""Rotary position embedding, half-rotation (NeoX) layout, from explicit positions.

The tables are computed in fp32 at every call: no buffer means nothing to save, to move between
devices, or to share between threads. Not covered: scaled or partial RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Angles of positions [b, T] as cos and sin tables, each [b, 1, T, D/2] fp32.

    Pair i turns by `position * theta^(-2i/D)` (RoFormer, arXiv 2104.09864, section 3.2.2).
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / (theta ** (pairs / head_dim))
    angles = positions[:, None, :, None].to(torch.float32) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [b, heads, T, D], whose pair i is (x[i], x[i + D/2]); same shape and dtype."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
