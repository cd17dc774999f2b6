"""Head, loss and metrics of all blocks, a few blocks' logits at a time.

Logits of a large vocabulary are the largest tensor of a step (8,192 slots x 151,936 fp32: 5 GB,
and the softmax and its gradient as much again each). Here one buffer [chunk, V] exists at a time
and is turned from logits into probabilities into the gradient in place; a teacher's distribution
is a second one. The gradient with respect to the hidden states is made in the forward pass, so the
head runs once; backward only scales it.

Slots that do not count, slot 0 among them, never reach the head: a NaN there harms nothing.
The head is a constant: it gets no gradient. Not covered: a head that is split over devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dflash.config import ObjectiveSettings
from dflash.objective.losses import LossSums
from dflash.objective.metrics import MetricSums, metrics_of_hits
from dflash.objective.weighting import WEIGHTINGS


def block_objective(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    counted: Tensor,
    settings: ObjectiveSettings,
    teacher: Tensor | None = None,
) -> tuple[LossSums, MetricSums]:
    """Sums of loss and metrics over the slots in ``counted``; the numerator carries the gradient.

    hidden: [N, B, H], any float dtype; cast to the head's for the head. head: [..., H] -> [..., V].
    labels: [N, B] int64, any value outside ``counted``. counted: [N, B] bool, False in slot 0.
    ``settings.head_chunk_slots`` bounds the slots whose logits exist (but at least one block's).
    teacher: [N, B, H], the target's last hidden states (after its final norm) that the labels were
    predicted from, or None. With ``settings.teacher_share`` = s > 0 the loss of a slot is
    (1 - s) * cross-entropy of the label + s * cross-entropy of the target's distribution (Hinton et
    al., arXiv 1503.02531, at temperature 1). Unweighted sums and metrics are of the labels.
    Cross-entropy is computed in fp32 (fp64 for an fp64 head) and summed in fp64.

    Raises ValueError where the shapes do not fit, slot 0 counts, or the teacher is missing.
    """
    if hidden.dim() != 3 or hidden.shape[:2] != labels.shape or counted.shape != labels.shape:
        raise ValueError(
            f"block_objective: hidden [N, B, H], labels [N, B] and counted [N, B] do not fit: "
            f"{tuple(hidden.shape)}, {tuple(labels.shape)}, {tuple(counted.shape)}"
        )
    if bool(counted[:, 0].any()):
        raise ValueError("block_objective: slot 0 counts: it holds the anchor and predicts nothing")
    if (settings.teacher_share > 0) and (teacher is None or teacher.shape != hidden.shape):
        raise ValueError(
            f"block_objective: objective.teacher_share={settings.teacher_share} needs a teacher of "
            f"hidden's shape {tuple(hidden.shape)}"
        )
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    numerator, denominator, unweighted, hit = _Objective.apply(  # type: ignore[no-untyped-call]
        hidden, head, labels, counted, settings, wanted, teacher
    )
    loss = LossSums(numerator, denominator, unweighted, counted.sum())
    return loss, metrics_of_hits(hit, counted)


class _Objective(torch.autograd.Function):
    """(hidden, ...) -> numerator, denominator, unweighted numerator (fp64), hits [N, B] bool."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: nn.Module,
        labels: Tensor,
        counted: Tensor,
        settings: ObjectiveSettings,
        wanted: bool,
        teacher: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradient = torch.zeros_like(hidden) if wanted else None
        hit = torch.zeros_like(counted)
        sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)
        for blocks in _chunks(counted, settings.head_chunk_slots):
            mask = counted[blocks]  # [n, B]
            where = (blocks[:, None].expand_as(mask)[mask], mask.nonzero()[:, 1])
            taught = teacher[where] if teacher is not None and settings.teacher_share else None
            chunk = _Chunk(
                head, hidden[where], labels[where], wanted, taught, settings.teacher_share
            )
            ce = chunk.ce.new_zeros(mask.shape)
            ce[mask] = chunk.ce
            weights = WEIGHTINGS[settings.weighting](ce, mask, settings)
            hit[where] = chunk.hit
            loss = chunk.loss * weights[mask]
            sums += torch.stack(
                [part.sum(dtype=torch.float64) for part in (loss, weights, chunk.ce)]
            )
            if gradient is not None:
                gradient[where] = chunk.gradient(weights[mask]).to(gradient.dtype)
            del chunk  # before the next one is made: its logits are what chunking is about
        if gradient is not None:
            ctx.save_for_backward(gradient)
        numerator, denominator, unweighted = (each.clone() for each in sums)
        ctx.mark_non_differentiable(denominator, unweighted, hit)
        return numerator, denominator, unweighted, hit

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None, None


class _Chunk:
    """The head on hidden states [M, H]: cross-entropies and hits [M] now, the gradient on demand.

    ``_buffer`` [M, V] holds the softmax's numerators exp(z - max z) afterwards. ``loss`` is ``ce``
    mixed with the cross-entropy of the teacher's distribution, where there is a teacher.
    """

    def __init__(
        self,
        head: nn.Module,
        hidden: Tensor,
        labels: Tensor,
        wanted: bool,
        teacher: Tensor | None,
        share: float,
    ) -> None:
        dtype = next((p.dtype for p in head.parameters()), hidden.dtype)
        self._hidden = hidden.detach().to(dtype).requires_grad_(wanted)
        self._labels = labels[:, None]
        with torch.set_grad_enabled(wanted):
            self._logits = head(self._hidden)  # [M, V]
        logits = self._logits.detach()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if wide.data_ptr() == logits.data_ptr() and wanted and not isinstance(head, nn.Linear):
            wide = wide.clone()  # such a head's own backward may need its output
        top, best = wide.max(dim=-1, keepdim=True)
        chosen = wide.gather(1, self._labels) - top
        self._share = share if teacher is not None else 0.0
        self._taught: Tensor | None = None
        shifted = wide.sub_(top)
        mean = chosen[:, 0]
        if teacher is not None:
            with torch.no_grad():
                said = head(teacher.detach().to(dtype))
            self._taught = torch.softmax(said.to(wide.dtype), dim=-1)
            mean = torch.einsum("mv,mv->m", self._taught, shifted)
        self._buffer = shifted.exp_()
        self._total = self._buffer.sum(dim=-1, keepdim=True)
        self.ce = (self._total.log() - chosen)[:, 0]
        self.loss = (1 - self._share) * self.ce + self._share * (self._total.log()[:, 0] - mean)
        self.hit = (best == self._labels)[:, 0]

    def gradient(self, weights: Tensor) -> Tensor:
        """d(sum of weights * loss) / d hidden: [M, H] in the head's dtype; uses the buffer up."""
        scale = weights[:, None]
        by_logits = self._buffer.mul_(scale / self._total)  # softmax * weight
        by_logits.scatter_add_(1, self._labels, -scale * (1 - self._share))
        if self._taught is not None:
            by_logits.addcmul_(self._taught, -scale * self._share)
        (by_hidden,) = torch.autograd.grad(
            self._logits, self._hidden, by_logits.to(self._logits.dtype)
        )
        return by_hidden


def _chunks(counted: Tensor, slots: int) -> Iterator[Tensor]:
    """Numbers of the blocks with a slot that counts, in runs of at most ``slots`` such slots.

    Whole blocks, because a weighting looks at whole blocks.
    """
    blocks = counted.any(dim=1).nonzero()[:, 0]
    per_chunk = max(1, slots // max(1, counted.shape[1] - 1))
    for start in range(0, len(blocks), per_chunk):
        yield blocks[start : start + per_chunk]
