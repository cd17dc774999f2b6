"""Prompts to decode from: what ``dflash eval`` asks the target and the drafter to go on from.

Of a conversation, everything up to its last answer; of a record with a text or token ids, all of
it, or its stated prompt; of any other file its beginning, middle and end, none picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.data import BadLine, DataError, Sample, data_files, read_samples, render_sample

PROMPT_TOKENS = 64


def read_prompts(
    paths: Sequence[str | Path], tokenizer: Any, *, prompt_tokens: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Token ids of all prompts of files, folders or named sources, in order.

    prompt_tokens: length of the pieces of plain files.
    Raises DataError where a path cannot be read, a record is bad, or nothing is left.
    """
    prompts: list[list[int]] = []
    for file in data_files(paths):
        for sample in read_samples([file]):
            if isinstance(sample, BadLine):
                raise DataError(f"{sample}: cannot be read as a prompt")
            prompts += _of_sample(sample, tokenizer, file.suffix.lower() in (".jsonl", ".ndjson"),
                                  prompt_tokens)  # fmt: skip
    prompts = [ids for ids in prompts if ids]
    if not prompts:
        raise DataError(f"{', '.join(map(str, paths))}: holds no prompt")
    return prompts


def _of_sample(sample: Sample, tokenizer: Any, record: bool, size: int) -> list[list[int]]:
    if sample.token_ids is not None:
        ids = list(sample.token_ids)
        return [ids[: sample.prompt_length] if sample.prompt_length else ids]
    if sample.text is not None:
        ids = tokenizer(sample.text, add_special_tokens=False, verbose=False)["input_ids"]
        if record or len(ids) <= size:
            return [ids]
        middle = (len(ids) - size) // 2
        return [ids[:size], ids[middle : middle + size], ids[-size:]]
    document = render_sample(sample, tokenizer, "last_turn")
    if isinstance(document, BadLine):
        raise DataError(f"{document}: cannot be read as a prompt")
    mask = document.loss_mask.tolist()
    return [document.input_ids.tolist()[: mask.index(True) if True in mask else len(mask)]]
