"""What is trained: anchors, block layout, attention mask, labels, loss and metrics of one row.

Every function works on one packed row of fixed length S with a fixed number N of block slots, so
that shapes never change. Losses and metrics are sums; whoever pools them divides, once.
"""

from dflash.objective.anchors import Anchors, sample_anchors
from dflash.objective.block_mask import dense_mask, flex_block_mask
from dflash.objective.labels import block_labels
from dflash.objective.layout import block_token_ids, positions
from dflash.objective.losses import LossSums, decay_weights, decayed_cross_entropy, paper_gamma
from dflash.objective.metrics import MetricSums, block_metrics

__all__ = [
    "Anchors",
    "LossSums",
    "MetricSums",
    "block_labels",
    "block_metrics",
    "block_token_ids",
    "decay_weights",
    "decayed_cross_entropy",
    "dense_mask",
    "flex_block_mask",
    "paper_gamma",
    "positions",
    "sample_anchors",
]
