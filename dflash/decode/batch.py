"""Plain decoding of many prompts at a time, for making training text rather than for serving.

Prompts of different lengths are padded on the left and masked. Draws come from one generator per
batch, so the text depends on the batch's prompts, temperatures and seed, not on what runs beside
it. Not covered: drafts, sampling filters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash.decode.accept import probabilities


@torch.inference_mode()
def continue_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    stop_token_ids: Sequence[int] = (),
    seed: int,
    go_on: Callable[[], bool] = lambda: True,
) -> list[list[int]]:
    """The new tokens after each prompt (token ids, at least one), up to and with a stop token.

    temperatures: one per prompt; 0 is greedy. go_on: asked before every token; False ends early.
    """
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    seen = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        seen[row, longest - len(prompt) :] = 1
    ids, seen = ids.to(device), seen.to(device)
    positions = (seen.cumsum(1) - 1).clamp_min(0)
    heat = torch.tensor(temperatures, device=device)
    stops = torch.tensor(list(stop_token_ids), device=device, dtype=torch.int64)
    generator = torch.Generator(device).manual_seed(seed)
    config: Any = model.config
    cache = DynamicCache(config=config)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    columns: list[Tensor] = []
    ended: list[Tensor] = []
    for _ in range(max_new_tokens):
        if not go_on() or bool(done.all()):
            break
        logits = model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        ids = _next(logits, heat, generator)[:, None]
        columns.append(ids[:, 0])
        ended.append(done)
        done = done | torch.isin(ids[:, 0], stops)
        seen = torch.cat((seen, torch.ones_like(ids)), 1)
        positions = positions[:, -1:] + 1
    if not columns:
        return [[] for _ in prompts]
    lengths = (~torch.stack(ended, 1)).sum(1).tolist()
    rows = torch.stack(columns, 1).tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _next(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row: the most likely where the temperature is 0, else a sample. [b] int64."""
    greedy = logits.argmax(-1)
    if not bool((temperatures > 0).any()):
        return greedy
    warm = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    drawn = torch.multinomial(probabilities(logits, warm[:, None]), 1, generator=generator)[:, 0]
    return torch.where(temperatures > 0, drawn, greedy)
