"""One drafter on its device: turns a packet into gradients, or into held-out counts.

Holds a replica of the drafter, its own compiled flex_attention behind the guard, and copies of the
target's frozen embedding and head on the same device. Shapes are the recipe's, so there is one
compile for training and one for evaluation.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from dflash.compile import CompileGuard
from dflash.compile.flex_on_cpu import training_backend
from dflash.config import Recipe
from dflash.model import Drafter, DrafterConfig, flex_attend
from dflash.objective import (
    LossSums,
    MetricSums,
    block_labels,
    block_token_ids,
    flex_block_mask,
    positions,
)
from dflash.objective.chunked import block_objective
from dflash.schedule.exchange import Packet
from dflash.schedule.topology import Place
from dflash.schedule.worker import timed
from dflash.transfer import receive, to_device


@dataclass
class Sums:
    """What one drafter contributes to a step, on the CPU: sums only.

    Attributes:
        loss, metrics: see :mod:`dflash.objective`.
        anchors: valid anchors used.
        slots: anchor slots there were.
        tokens: tokens of the rows (padding aside).
    """

    loss: LossSums
    metrics: MetricSums
    anchors: int
    slots: int
    tokens: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.loss + other.loss,
            self.metrics + other.metrics,
            self.anchors + other.anchors,
            self.slots + other.slots,
            self.tokens + other.tokens,
        )


class Learner:
    """See the module's docstring.

    Args:
        place: worker name and device.
        embedding, head: the target's, frozen, on this learner's device.
    """

    def __init__(
        self,
        place: Place,
        recipe: Recipe,
        config: DrafterConfig,
        embedding: nn.Module,
        head: nn.Module,
        guard: CompileGuard,
    ) -> None:
        self.place, self.recipe, self.config, self.guard = place, recipe, config, guard
        self.device = place.device
        self.embedding, self.head = embedding, head
        self.drafter = Drafter(config)
        self.drafter.init_weights(torch.Generator().manual_seed(recipe.run.seed))
        self.drafter.to(self.device)
        backend = training_backend(self.device)
        self._attend = {
            mode: flex_attend(
                guard.compile(flex_attention, label=f"{place.worker} {mode}", backend=backend)
            )
            for mode in ("train", "evaluate")
        }
        self.compiled: set[str] = set()

    @property
    def parameters(self) -> list[Tensor]:
        """In the order of the state dict."""
        return list(self.drafter.parameters())

    def learn(self, packet: Packet) -> Sums:
        """Forward and backward of one packet; gradients of the *numerator* add up in ``.grad``.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        loss, metrics = self._forward(packet, "train")
        value = float(loss.numerator.detach())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"packet {packet.number}: the loss is {value}; look at the "
                "learning rate, the target's dtype and the features"
            )
        if loss.numerator.requires_grad:
            with self.guard.region():
                loss.numerator.backward()
        self.compiled.add("train")
        return self._sums(packet, loss, metrics)

    @torch.no_grad()
    def evaluate(self, packet: Packet) -> Sums:
        """The same counts without gradients."""
        loss, metrics = self._forward(packet, "evaluate")
        self.compiled.add("evaluate")
        return self._sums(packet, loss, metrics)

    def _forward(self, packet: Packet, mode: str) -> tuple[LossSums, MetricSums]:
        with timed("copy"):
            features = receive(packet.features, packet.ready, self.device)
        config, row, anchors = self.config, packet.row, packet.anchors
        block = config.block_size
        ids = block_token_ids(row.input_ids, anchors, block, config.mask_token_id)
        labels, counted = block_labels(
            row.input_ids, row.loss_mask, row.document_ids, anchors, block
        )
        mask = flex_block_mask(anchors, row.document_ids, block, device=self.device)
        place = to_device(positions(row.position_ids, anchors, block)[None], self.device)
        with self._autocast():
            hidden = self.drafter(
                features.to(_compute_dtype(self.device, self.recipe)),
                self.embedding(to_device(ids, self.device))[None].detach().float(),
                place,
                mask,
                self._attend[mode],
            )
        return block_objective(
            hidden[0].unflatten(0, (anchors.slots, block)),
            self.head,
            to_device(labels, self.device),
            to_device(counted, self.device),
            self.recipe.objective,
            self._teacher(packet),
        )

    def _teacher(self, packet: Packet) -> Tensor | None:
        """The target's hidden states [N, B, H] that slot k's token was predicted from: at a+k-1."""
        if packet.teacher is None:
            return None
        final = receive(packet.teacher, packet.teacher_ready, self.device)[0]
        slot = torch.arange(self.config.block_size)
        where = (packet.anchors.positions[:, None] + slot - 1).clamp(0, final.shape[0] - 1)
        return final[to_device(where, self.device)]

    def _sums(self, packet: Packet, loss: LossSums, metrics: MetricSums) -> Sums:
        return Sums(
            LossSums(
                loss.numerator.detach().double().cpu(),
                loss.denominator.detach().double().cpu(),
                loss.unweighted_numerator.detach().double().cpu(),
                loss.count.cpu(),
            ),
            MetricSums(
                metrics.correct.cpu(),
                metrics.total.cpu(),
                metrics.committed.cpu(),
                metrics.blocks.cpu(),
            ),
            anchors=int(packet.anchors.valid.sum()),
            slots=packet.anchors.slots,
            tokens=int((packet.row.document_ids >= 0).sum()),
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if autocasts(self.device, self.recipe):
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()


def autocasts(device: torch.device, recipe: Recipe) -> bool:
    """Whether the drafter computes in bf16 there: on GPUs that have it, unless switched off."""
    return (
        recipe.run.autocast == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )


def _compute_dtype(device: torch.device, recipe: Recipe) -> torch.dtype:
    return torch.bfloat16 if autocasts(device, recipe) else torch.float32
