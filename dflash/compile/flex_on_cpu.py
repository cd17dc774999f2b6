"""Lets ``flex_attention`` train on CPU, which torch allows on GPUs only.

``flex_attention`` refuses inputs that require gradients on CPU in one Python check
(``torch.nn.attention.flex_attention._validate_device``). With the check lifted the ``aot_eager``
backend computes the dense form, forward and backward, and agrees with SDPA to float rounding.
Inductor's CPU lowering has no backward, so ``aot_eager`` is the only backend that trains here.

For tests and for CPU recipes. On a GPU nothing of this is needed, and nothing is changed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import flex_attention as flex

# Backend that trains flex_attention, by device type.
TRAINING_BACKEND = {"cpu": "aot_eager", "cuda": "inductor"}


def training_backend(device: torch.device | str) -> str:
    """The dynamo backend with which flex_attention trains on ``device``."""
    kind = torch.device(device).type
    if kind not in TRAINING_BACKEND:
        raise ValueError(f"flex_attention does not train on {kind!r}: use a cpu or cuda device")
    return TRAINING_BACKEND[kind]


@contextlib.contextmanager
def flex_training_on_cpu() -> Iterator[None]:
    """While open, ``flex_attention`` accepts CPU tensors that require gradients.

    Process-wide, so open it once, before threads start. Other devices are still checked.
    """
    check = flex._validate_device

    def lenient(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> None:
        if query.device.type != "cpu":
            check(query, key, value, *args, **kwargs)

    flex._validate_device = lenient
    try:
        yield
    finally:
        flex._validate_device = check
