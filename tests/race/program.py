"""The program under test: three DFlash drafters, each with its own compiled flex_attention.

Training-shaped on purpose: forward and backward, and a new row length every few steps, so that
one thread compiles again while the others are warm. Every (drafter, row length) pair has a
single-threaded SDPA reference, computed before any thread starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.compile.flex_on_cpu import training_backend
from dflash.model.attention import flex_attend, sdpa_attend
from dflash.model.config import DrafterConfig
from dflash.model.drafter import Drafter
from dflash.objective.anchors import Anchors, sample_anchors
from dflash.objective.block_mask import dense_mask, flex_block_mask
from dflash.objective.layout import positions

DRAFTERS = 3
STEPS_PER_LENGTH = 4
LENGTHS = 2  # row lengths that one drafter sees
STEPS = STEPS_PER_LENGTH * LENGTHS
SLOTS = 8
TOLERANCE = 2e-4  # fp32, two layers, sums in another order

CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    target_hidden_size=32,
    num_target_layers=6,
    target_layer_ids=(1, 3),
    block_size=4,
    mask_token_id=63,
    vocab_size=64,
    rope_theta=10000.0,
)


@dataclass
class Row:
    """One drafter's inputs at one row length, and what single-threaded SDPA makes of them."""

    features: Tensor
    blocks: Tensor
    positions: Tensor
    anchors: Anchors
    documents: Tensor
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: list[Tensor] = field(default_factory=list)

    def block_mask(self, by_torch: bool) -> BlockMask:
        """The trainer's own mask, or the same one built by torch's helper, as users build it.

        torch's helper annotates (``torch.fx.traceback.annotate``), and that is one of the races;
        the trainer's ``flex_block_mask`` makes its lists itself and never does.
        """
        own = flex_block_mask(self.anchors, self.documents, CONFIG.block_size)
        if not by_torch:
            return own
        queries = SLOTS * CONFIG.block_size
        keys = self.documents.shape[0] + queries
        device = self.features.device
        return create_block_mask(own.mask_mod, None, None, queries, keys, device=device)


def row_length(drafter: int, step: int) -> int:
    """A length that no other drafter has, so that nobody finds another's compiled entry."""
    return 48 + 16 * drafter + 96 * (step // STEPS_PER_LENGTH)


class Workshop:
    """Drafters, rows and references on their devices; built in one thread, before any other."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices = devices
        self.drafters: list[Drafter] = []
        self.rows: dict[tuple[int, int], Row] = {}
        for index, device in enumerate(devices):
            drafter = Drafter(CONFIG)
            drafter.init_weights(torch.Generator().manual_seed(index))
            self.drafters.append(drafter.to(device))
            for step in range(0, STEPS, STEPS_PER_LENGTH):
                length = row_length(index, step)
                row = self.rows[index, length] = _random_row(length, seed=index, device=device)
                self._refer(drafter, row)

    def row(self, drafter: int, step: int) -> Row:
        return self.rows[drafter, row_length(drafter, step)]

    def backend(self) -> str:
        return training_backend(self.devices[0])

    def _refer(self, drafter: Drafter, row: Row) -> None:
        mask = dense_mask(row.anchors, row.documents, CONFIG.block_size)[None, None]
        output = drafter(row.features, row.blocks, row.positions, mask, sdpa_attend)
        _loss(output).backward()
        row.output = output.detach()
        row.gradients = take_gradients(drafter)


def train_step(
    drafter: Drafter,
    row: Row,
    attend: Callable[..., Tensor],
    region: Callable[[], Any],
    torch_masks: bool,
) -> tuple[float, float]:
    """One forward and backward; returns the largest difference of output and of gradients."""
    mask = row.block_mask(torch_masks)
    output = drafter(row.features, row.blocks, row.positions, mask, flex_attend(attend))
    with region():
        _loss(output).backward()
    gradients = take_gradients(drafter)
    return (
        float((output.detach() - row.output).abs().max()),
        max(
            float((got - want).abs().max())
            for got, want in zip(gradients, row.gradients, strict=True)
        ),
    )


def take_gradients(drafter: Drafter) -> list[Tensor]:
    """The gradients of all parameters, and leaves none behind."""
    taken = [parameter.grad for parameter in drafter.parameters()]
    drafter.zero_grad(set_to_none=True)
    return [gradient for gradient in taken if gradient is not None]


def plain_compile(backend: str) -> Callable[..., Tensor]:
    """What the users did: each thread its own ``torch.compile`` of the one flex_attention."""
    return torch.compile(flex_attention, backend=backend, dynamic=False)  # type: ignore[no-any-return]


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _random_row(length: int, *, seed: int, device: torch.device) -> Row:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    documents = torch.zeros(length, dtype=torch.int64)
    documents[length // 2 :] = 1
    supervised = torch.ones(length, dtype=torch.bool)
    anchors = sample_anchors(supervised, documents, SLOTS, seed=seed, epoch=0, sample=length)
    local = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])
    features = torch.randn(1, length, CONFIG.feature_size, generator=generator)
    blocks = torch.randn(1, SLOTS * CONFIG.block_size, CONFIG.hidden_size, generator=generator)
    return Row(
        features.to(device),
        blocks.to(device),
        positions(local, anchors, CONFIG.block_size)[None].to(device),
        Anchors(anchors.positions.to(device), anchors.valid.to(device)),
        documents.to(device),
    )
