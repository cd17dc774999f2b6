"""What proposes a block: a drafter with its cached context, or anything with the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dflash.decode.target import DecodeError
from dflash.model import ContextCache, Drafter


class Proposer(Protocol):
    """Proposes what follows an anchor; holds the state of one text at a time."""

    @property
    def block_size(self) -> int:
        """B."""
        ...

    @property
    def target_layer_ids(self) -> Sequence[int]:
        """0-based decoder layers whose features `propose` wants, in their order."""
        ...

    def start(self) -> None:
        """Forget the last text."""
        ...

    def propose(self, features: Tensor, anchor: int) -> Tensor:
        """Logits [B-1, V] of the B-1 tokens after `anchor`.

        features: [1, n, K*H_t] of the n positions that were committed since the last call and come
        before the anchor; together with the earlier ones they are the whole context.
        """
        ...


class BlockProposer:
    """The drafter as it serves: one pass over [anchor, mask x (B-1)], context from the cache.

    The embedding and the head are the target's. Always runs the whole block, as in training, also
    where fewer tokens are wanted: the slots see each other.
    """

    def __init__(self, drafter: Drafter, target: nn.Module) -> None:
        config, model = drafter.config, _check(drafter, target)
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self._drafter = drafter
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self._where = drafter.fc.weight
        self._block = torch.full(
            (1, config.block_size), config.mask_token_id, device=device_of(self._embedding)
        )
        self._cache = ContextCache()

    def start(self) -> None:
        self._cache = ContextCache()

    def propose(self, features: Tensor, anchor: int) -> Tensor:
        features = features.to(device=self._where.device, dtype=self._where.dtype)
        self._drafter.extend_context(features, self._cache)
        self._block[0, 0] = anchor
        x = embed_block(self._block, self._embedding, self._where)
        hidden = self._drafter.decode(x, self._cache)[0, 1:]  # slot 0 proposes nothing
        return apply_head(hidden, self._head)


def embed_block(token_ids: Tensor, embedding: nn.Module, like: Tensor) -> Tensor:
    """The target's embedding of `token_ids` [...], as training has it; in `like`'s dtype, there."""
    x: Tensor = embedding(token_ids.to(device_of(embedding)))
    return x.to(device=like.device, dtype=like.dtype)


def device_of(embedding: nn.Module) -> torch.device:
    """Where an embedding or a head lies."""
    return next(embedding.parameters()).device


def apply_head(hidden: Tensor, head: nn.Module) -> Tensor:
    """The target's output head on drafter states [..., H], in the head's dtype -> [..., V]."""
    weight: Any = head.weight
    logits: Tensor = head(hidden.to(device=weight.device, dtype=weight.dtype))
    return logits


def _check(drafter: Drafter, target: nn.Module) -> Any:
    model: Any = target
    head = model.get_output_embeddings()
    if head is None:
        raise DecodeError(f"{type(target).__name__} has no output head: not a causal LM")
    rows, width = model.get_input_embeddings().weight.shape
    config = drafter.config
    if width != config.hidden_size or config.mask_token_id >= rows:
        raise DecodeError(
            f"drafter and target do not fit: the target's embedding is [{rows}, {width}], the "
            f"drafter's hidden_size {config.hidden_size} and mask_token_id {config.mask_token_id}"
        )
    return model
