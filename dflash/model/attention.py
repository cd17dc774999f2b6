"""Attention of one drafter layer, and the functions that can carry it out.

The layer is told how to attend by a plain callable, so that each drafter thread can own its own
compiled `flex_attention` and tests can use the SDPA oracle on the same weights. Decoding computes
the context's keys and values once and keeps them (`dflash.model.cache`). Not covered: building
masks (`dflash.objective`), causal or sliding layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.model.config import DrafterConfig
from dflash.model.linear import Linear
from dflash.model.norm import RMSNorm
from dflash.model.rotary import rotate


class Attend(Protocol):
    """softmax(scale * q k^T, masked) v, with key/value heads shared by groups of query heads.

    q [b, Hq, Q, D]; k and v [b, Hkv, K, D]; `mask` in whatever form this function takes;
    returns [b, Hq, Q, D].
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor: ...


def sdpa_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend through `scaled_dot_product_attention`: works everywhere, and is the oracle.

    `mask` is bool, True where the key is visible, [b, 1, Q, K] or broadcastable to it; None lets
    every query see every key. Raises ValueError for any other dtype, which SDPA would *add*.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"sdpa_attend: mask must be bool (True = visible), got {mask.dtype}")
    group = q.shape[1] // k.shape[1]
    if group > 1:
        # Repeating by hand keeps the memory-efficient kernels eligible; enable_gqa does not.
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def flex_attend(
    flex: Callable[..., Any], *, kernel_options: dict[str, Any] | None = None
) -> Attend:
    """Make an Attend from a (compiled) `flex_attention`; its `mask` is then a BlockMask.

    `kernel_options` goes through to the kernels (smaller tiles for GPUs with little shared
    memory). Called uncompiled, flex_attention materialises all scores; on CPU it has no backward.
    """
    options: dict[str, Any] = {} if kernel_options is None else {"kernel_options": kernel_options}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        out: Tensor = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped, **options)
        return out

    return attend


class DrafterAttention(nn.Module):
    """Block slots attend to [context ; block slots] through one set of projections.

    The context enters every layer through that layer's own `k_proj` and `v_proj` ("KV injection";
    DFlash, arXiv 2602.06036). It is already normalised by `hidden_norm`, so it does not pass
    `input_layernorm`; only keys and queries are normalised per head.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        width, bias = config.hidden_size, config.attention_bias
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(width, q_width, bias=bias)
        self.k_proj = Linear(width, kv_width, bias=bias)
        self.v_proj = Linear(width, kv_width, bias=bias)
        self.o_proj = Linear(q_width, width, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, u: Tensor, c: Tensor, cos: Tensor, sin: Tensor, mask: Any, attend: Attend
    ) -> Tensor:
        """u [b, Q, H] block slots, c [b, S, H] context, tables [b, 1, S+Q, D/2] -> [b, Q, H]."""
        slots = u.shape[1]
        q = self.q_norm(self._heads(self.q_proj(u)))  # [b, Hq, Q, D]
        k = self.k_norm(self._heads(torch.cat((self.k_proj(c), self.k_proj(u)), dim=1)))
        v = self._heads(torch.cat((self.v_proj(c), self.v_proj(u)), dim=1))  # [b, Hkv, S+Q, D]
        # The queries are the last Q of the S+Q positions.
        q = rotate(q, cos[:, :, -slots:], sin[:, :, -slots:])
        k = rotate(k, cos, sin)
        out = attend(q, k, v, mask, self.scale)
        joined: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return joined

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What x [b, T, H] gives to attend to: rotated keys and values, [b, Hkv, T, D] each.

        The same for context (normalised features) and block slots (normalised stream).
        """
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        return k, self._heads(self.v_proj(x))

    def query(self, u: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """u [b, Q, H] attends to all of k and v [b, Hkv, K, D] -> [b, Q, H].

        No mask: while decoding, the keys are exactly what one block may see.
        """
        q = rotate(self.q_norm(self._heads(self.q_proj(u))), cos, sin)
        out = sdpa_attend(q, k, v, None, self.scale)
        joined: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, x: Tensor) -> Tensor:
        """[b, T, heads * D] -> [b, heads, T, D]."""
        rows, length, width = x.shape
        return x.view(rows, length, width // self.head_dim, self.head_dim).transpose(1, 2)
