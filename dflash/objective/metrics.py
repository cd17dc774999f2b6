"""Training metrics of blocks, as sums: accuracy of every slot, and simulated acceptance.

Simulated acceptance **includes the bonus token**, as the paper's acceptance length tau does. It
differs from measured acceptance in that the context is always the data's, and blocks that reach
the end of their supervised text are cut short there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MetricSums:
    """Counts, int64.

    correct [B]: slots whose most likely token is the label, for every slot number.
    total [B]: slots that count. Accuracy of slot k = correct[k] / total[k].
    committed []: over the blocks with a counting slot, leading correct slots + 1 (the bonus).
    blocks []: those blocks. Simulated acceptance length, bonus included = committed / blocks.
    """

    correct: Tensor
    total: Tensor
    committed: Tensor
    blocks: Tensor

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums(
            self.correct + other.correct,
            self.total + other.total,
            self.committed + other.committed,
            self.blocks + other.blocks,
        )


@torch.no_grad()
def block_metrics(logits: Tensor, labels: Tensor, mask: Tensor) -> MetricSums:
    """Count hits. logits: [N, B, V]; labels: [N, B] int64; mask: [N, B] bool, False in slot 0.

    The leading run of a block starts at slot 1 and ends before its first slot that is wrong or
    does not count.
    """
    return metrics_of_hits((logits.argmax(-1) == labels) & mask, mask)


@torch.no_grad()
def metrics_of_hits(hit: Tensor, mask: Tensor) -> MetricSums:
    """The same from hits [N, B] bool, False outside ``mask``."""
    run = hit[:, 1:].to(torch.int64).cumprod(dim=1).sum(dim=1)  # [N]
    judged = mask.any(dim=1)
    return MetricSums(
        correct=hit.sum(dim=0),
        total=mask.sum(dim=0),
        committed=((run + 1) * judged).sum(),
        blocks=judged.sum(),
    )
