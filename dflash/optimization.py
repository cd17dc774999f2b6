"""One optimizer step from pooled sums: divide, clip, learning rate, AdamW or Muon.

Weights, optimizer state and step counters are fp32; autocast is for the compute before. The
schedule is a function of the step alone, so a resumed run goes on exactly where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.config import OptimizerSettings


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1.0 - progress


def _constant(progress: float) -> float:
    return 1.0


# progress after the warm-up, 0 to 1 -> factor of the way from the floor to the peak
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
}


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """Of step ``step`` (from 0) of ``steps``: linear warm-up to the peak, then the schedule."""
    warmup = round(settings.warmup_ratio * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    floor = settings.min_lr_ratio
    return settings.learning_rate * (floor + (1 - floor) * SCHEDULES[settings.schedule](progress))


@dataclass(frozen=True)
class Part:
    """An optimizer of torch and the parameters that it steps.

    prefix: of its state's names. keys: of the state per parameter.
    """

    prefix: str
    optimizer: torch.optim.Optimizer
    named: dict[str, Tensor]
    keys: tuple[str, ...]


def _adamw(settings: OptimizerSettings, named: Mapping[str, Tensor]) -> list[Part]:
    optimizer = torch.optim.AdamW(
        list(named.values()),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        # The other implementations ask whether anything compiles, in any thread, and then
        # compute in another order; this one does not (and is the fastest).
        fused=True,
    )
    return [Part("adamw", optimizer, dict(named), ("step", "exp_avg", "exp_avg_sq"))]


def _muon(settings: OptimizerSettings, named: Mapping[str, Tensor]) -> list[Part]:
    """Orthogonalised momentum (K. Jordan 2024) for matrices, AdamW for the rest.

    Updates are scaled to AdamW's size (arXiv 2502.16982), so that learning rates carry over.
    """
    matrices = {name: p for name, p in named.items() if p.ndim == 2}
    others = {name: p for name, p in named.items() if p.ndim != 2}
    muon = torch.optim.Muon(
        list(matrices.values()),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [Part("muon", muon, matrices, ("momentum_buffer",)), *_adamw(settings, others)]


OPTIMIZERS: dict[str, Callable[[OptimizerSettings, Mapping[str, Tensor]], list[Part]]] = {
    "adamw": _adamw,
    "muon": _muon,
}


class Optimizer:
    """The recipe's optimizer over the master drafter's parameters.

    Args:
        named: name -> parameter, fp32, in a fixed order.
        steps: length of the run, for the schedule.
    """

    def __init__(
        self, settings: OptimizerSettings, named: Mapping[str, Tensor], steps: int
    ) -> None:
        for name, parameter in named.items():
            if parameter.dtype != torch.float32:
                raise ValueError(f"optimizer: {name} is {parameter.dtype}, weights must be float32")
        self.settings = settings
        self.steps = steps
        self._parameters = list(named.values())
        self._parts = OPTIMIZERS[settings.name](settings, named)

    @torch.no_grad()
    def step(
        self, number: int, gradients: Sequence[Tensor], denominator: float
    ) -> dict[str, float]:
        """Step ``number``: ``gradients`` are of a summed numerator, ``denominator`` is pooled.

        Returns the learning rate and the gradient's norm before clipping. With a denominator of 0
        (no supervised slot anywhere) nothing changes.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        rate = learning_rate(self.settings, number, self.steps)
        if denominator <= 0:
            return {"learning_rate": rate, "gradient_norm": 0.0}
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.div_(denominator)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip))
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {number}: the gradient's norm is {norm}")
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = rate
            part.optimizer.step()
        return {"learning_rate": rate, "gradient_norm": norm}

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name: ``adamw.exp_avg.NAME`` ... (copies, on the CPU)."""
        return {
            f"{part.prefix}.{key}.{name}": torch.as_tensor(value).detach().cpu().clone()
            for part in self._parts
            for name, parameter in part.named.items()
            for key, value in part.optimizer.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`tensors`.

        Raises:
            ValueError: they are another optimizer's, or of other parameters.
        """
        if not tensors:
            return  # saved before the first step
        expected = {
            f"{part.prefix}.{key}.{name}"
            for part in self._parts
            for name in part.named
            for key in part.keys
        }
        if differing := sorted(expected ^ tensors.keys()):
            where = "saved state" if differing[0] in tensors else "recipe's optimizer"
            raise ValueError(f"only the {where} has {differing[0]}")
        for part in self._parts:
            for name, parameter in part.named.items():
                part.optimizer.state[parameter] = {
                    key: tensors[f"{part.prefix}.{key}.{name}"].to(parameter.device, copy=True)
                    for key in part.keys
                }
