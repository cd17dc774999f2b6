"""Bits per byte: how well a causal LM predicts text, independent of its tokenizer.

Every byte of every file is scored once, the first ones given only the end-of-text token. Windows
overlap by half, so that (after the first) each token has at least half a window before it.
``python -m dflash.target.bits FOLDER [FILE ...]`` measures a saved model; without files, on the
standard library's held-out ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def bits_per_byte(
    model: nn.Module,
    files: Iterable[Path],
    tokenizer: Any,
    *,
    window: int = 512,
    batch: int = 16,
) -> float:
    """Total -log2 p of the files' tokens over their total number of UTF-8 bytes.

    window: tokens that the model sees at a time. The model runs as it is: put it in eval mode.
    Raises ValueError where the files hold no text.
    """
    device = next(model.parameters()).device
    nats, size = 0.0, 0
    waiting: list[tuple[Tensor, Tensor]] = []
    for path in files:
        text = path.read_bytes().decode()
        size += len(text.encode())
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        waiting.extend(_windows([tokenizer.eos_token_id, *ids], window))
        while len(waiting) >= batch:
            nats += _nats(model, waiting[:batch], window, device)
            del waiting[:batch]
    if size == 0:
        raise ValueError("bits_per_byte: the files hold no text")
    if waiting:
        nats += _nats(model, waiting, window, device)
    return nats / math.log(2) / size


def _windows(ids: list[int], window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, labels) of at most `window` tokens; labels that an earlier window had are -100."""
    tokens = torch.tensor(ids)
    scored = 1  # tokens before this index have been scored; the first is given
    start = 0
    while scored < len(tokens):
        end = min(start + window, len(tokens) - 1)
        labels = tokens[start + 1 : end + 1].clone()
        labels[: scored - start - 1] = -100
        yield tokens[start:end], labels
        scored = end + 1
        start += window // 2


def _nats(
    model: nn.Module, windows: list[tuple[Tensor, Tensor]], window: int, device: torch.device
) -> float:
    inputs = torch.zeros(len(windows), window, dtype=torch.int64)
    labels = torch.full((len(windows), window), -100)
    for row, (x, y) in enumerate(windows):  # padding is at the end, where a causal model's
        inputs[row, : len(x)] = x  # earlier positions cannot see it
        labels[row, : len(y)] = y
    logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
    return float(
        F.cross_entropy(logits.flatten(0, 1), labels.flatten().to(device), reduction="sum")
    )


def main(arguments: list[str]) -> None:
    """Prints the bits per byte of a saved model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dflash.data.stdlib import stdlib_sources

    folder, *names = arguments
    files = [Path(name) for name in names] or list(stdlib_sources().held_out)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    print(f"{bits_per_byte(model, files, tokenizer):.3f} bits per byte, {len(files)} files")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m dflash.target.bits FOLDER [FILE ...]")
    main(sys.argv[1:])
