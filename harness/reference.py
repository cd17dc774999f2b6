"""Numbers of one training step, and how far they are from a single-threaded reference.

A snapshot holds everything that a step changes: output, gradients, parameters and the state of
the optimizer. Eager optimizers take other branches while any thread compiles
(``torch.compiler.is_compiling()`` is the process's), so a comparison of outputs and gradients
alone would miss that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def snapshot(
    output: Any,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Copies of output, gradients, parameters and optimizer state; call it after the step."""
    taken: dict[str, Any] = {
        "output": _copy(output),
        "gradients": {name: _copy(p.grad) for name, p in module.named_parameters()},
        "parameters": {name: _copy(p) for name, p in module.named_parameters()},
    }
    if optimizer is not None:
        taken["optimizer"] = _copy(optimizer.state_dict()["state"])
    return taken


def largest_difference(got: Any, reference: Any) -> float:
    """The largest absolute difference of two nests of tensors and numbers.

    NaN when they do not have the same form, or when one is NaN where the other is not; anything
    that is neither tensor nor number must be equal.
    """
    import torch

    if isinstance(got, torch.Tensor) and isinstance(reference, torch.Tensor):
        if got.shape != reference.shape:
            return math.nan
        if got.numel() == 0:
            return 0.0
        wide = torch.complex128 if got.is_complex() or reference.is_complex() else torch.float64
        difference = (got.detach().to(wide) - reference.detach().to(wide)).abs()
        same = (got == reference) | (got.isnan() & reference.isnan())
        return float(torch.where(same, torch.zeros_like(difference), difference).max())
    if isinstance(got, Mapping) and isinstance(reference, Mapping):
        if got.keys() != reference.keys():
            return math.nan
        return _worst(largest_difference(got[key], reference[key]) for key in got)
    if isinstance(got, list | tuple) and isinstance(reference, list | tuple):
        if len(got) != len(reference):
            return math.nan
        return _worst(largest_difference(g, r) for g, r in zip(got, reference, strict=True))
    if isinstance(got, int | float) and isinstance(reference, int | float):
        if got == reference or (math.isnan(got) and math.isnan(reference)):
            return 0.0
        return abs(float(got) - float(reference))
    return 0.0 if got == reference else math.nan


def _worst(differences: Any) -> float:
    worst = 0.0
    for difference in differences:
        if math.isnan(difference):
            return math.nan
        worst = max(worst, difference)
    return worst


def _copy(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(entry) for entry in value]
    return value
