"""How much each slot counts in the loss: one row of a table per rule.

A rule sees the cross-entropies of whole blocks and returns constants. Whatever the rule, the loss
is the weighted sum over the sum of the weights, both pooled before the division.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dflash.config import ObjectiveSettings
from dflash.objective.dpace import dpace_weights
from dflash.objective.losses import decay_weights, paper_gamma

# (ce [N, B] detached, mask [N, B] bool, settings) -> weights [N, B], 0 outside the mask
Weighting = Callable[[Tensor, Tensor, ObjectiveSettings], Tensor]


def _decay(ce: Tensor, mask: Tensor, settings: ObjectiveSettings) -> Tensor:
    block = mask.shape[1]
    gamma = paper_gamma(block) if settings.gamma is None else settings.gamma
    return decay_weights(block, gamma).to(ce) * mask


def _uniform(ce: Tensor, mask: Tensor, settings: ObjectiveSettings) -> Tensor:
    return mask.to(ce.dtype)


def _dpace(ce: Tensor, mask: Tensor, settings: ObjectiveSettings) -> Tensor:
    return dpace_weights(ce, mask, settings.dpace_alpha)


WEIGHTINGS: dict[str, Weighting] = {"decay": _decay, "uniform": _uniform, "dpace": _dpace}
