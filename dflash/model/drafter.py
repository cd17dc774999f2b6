"""The drafter: target features in, one hidden state for every block slot out.

Covers the backbone and its initial weights. Does not hold the embedding or the output head (they
are the target's and frozen), rotary buffers, or a compiled function; a state dict is exactly the
11 L + 3 published tensors, without prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.model.attention import Attend, DrafterAttention
from dflash.model.cache import ContextCache
from dflash.model.config import DrafterConfig
from dflash.model.linear import Linear
from dflash.model.norm import RMSNorm
from dflash.model.rotary import rotary_tables


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); [..., H] -> [..., H], no biases."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DrafterLayer(nn.Module):
    """One pre-norm layer over the block slots; the context is read, never changed."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor, mask: Any, attend: Attend
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), c, cos, sin, mask, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def decode(
        self, x: Tensor, cache: ContextCache, index: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """One block x [b, B, H] over the context that `cache` holds for this layer, `index`."""
        u = self.input_layernorm(x)
        k, v = cache.joined(index, *self.self_attn.keys_values(u, cos, sin))
        x = x + self.self_attn.query(u, k, v, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """The block drafter of DFlash (arXiv 2602.06036, the draft model's section).

    A new drafter has the weights of `init_weights()`, so two drafters of one config are equal.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Matrices normal(0, initializer_range), gains 1, biases 0; in fixed order.

        Draws in fp32 on the generator's device and copies, so that one seed gives one drafter
        wherever its parameters live. None: a new CPU generator seeded with 0, never the global one.
        """
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, Linear):
                drawn = torch.empty(
                    module.weight.shape, device=generator.device, dtype=torch.float32
                )
                drawn.normal_(0.0, self.config.initializer_range, generator=generator)
                module.weight.copy_(drawn)
                if module.bias is not None:
                    module.bias.zero_()

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        positions: Tensor,
        mask: Any,
        attend: Attend,
    ) -> Tensor:
        """Hidden states of all block slots, ready for the target's head.

        features: [b, S, K*H_t], columns in the order of `target_layer_ids`.
        block_embeddings: [b, N*B, H], the target's embedding of the block token ids.
        positions: [b, S+N*B] int64, context first (or [1, S+N*B] for all rows).
        mask: whatever `attend` takes; one for all layers.
        Returns [b, N*B, H] in the dtype of the residual stream, which is `block_embeddings`'.

        Raises ValueError where the shapes do not fit together or the config.
        """
        self._check(features, block_embeddings, positions)
        c = self.hidden_norm(self.fc(features))  # [b, S, H], once for all layers
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = block_embeddings
        for layer in self.layers:
            x = layer(x, c, cos, sin, mask, attend)
        return self.norm(x)  # type: ignore[no-any-return]

    def extend_context(self, features: Tensor, cache: ContextCache) -> None:
        """Give the cache the keys and values of new context features [b, S_new, K*H_t].

        They stand at the positions that follow what the cache holds.
        """
        start, new = cache.length, features.shape[1]
        c = self.hidden_norm(self.fc(features))
        positions = torch.arange(start, start + new, device=features.device)[None]
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        layers = cast("Iterable[DrafterLayer]", self.layers)
        cache.append([layer.self_attn.keys_values(c, cos, sin) for layer in layers])

    def decode(self, block_embeddings: Tensor, cache: ContextCache) -> Tensor:
        """Hidden states [b, B, H] of the one block that follows the cached context.

        Equal to `forward` on the same features for a block anchored at `cache.length`: the block
        sees the whole cache and itself. Leaves the cache as it was.
        """
        start, slots = cache.length, block_embeddings.shape[1]
        positions = torch.arange(start, start + slots, device=block_embeddings.device)[None]
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = block_embeddings
        for index, layer in enumerate(cast("Iterable[DrafterLayer]", self.layers)):
            x = layer.decode(x, cache, index, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]

    def _check(self, features: Tensor, block_embeddings: Tensor, positions: Tensor) -> None:
        if features.dim() != 3 or features.shape[-1] != self.config.feature_size:
            raise ValueError(
                f"drafter: features must be [b, S, {self.config.feature_size}] "
                f"(K={self.config.num_features} target layers), got {tuple(features.shape)}"
            )
        if block_embeddings.dim() != 3 or block_embeddings.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"drafter: block_embeddings must be [b, N*B, {self.config.hidden_size}], "
                f"got {tuple(block_embeddings.shape)}"
            )
        keys = features.shape[1] + block_embeddings.shape[1]
        if positions.dim() != 2 or positions.shape[1] != keys:
            raise ValueError(
                f"drafter: positions must be [b, S+N*B] = [b, {keys}], got {tuple(positions.shape)}"
            )
