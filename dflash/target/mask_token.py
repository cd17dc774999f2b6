"""Which embedding row stands for "predict this slot": the drafter's mask token.

It is saved with the drafter and has to be the same in serving, so it must never be a token that
text uses for something else. Order: the recipe's, the tokenizer's own mask token, the first
embedding row that no token uses. Padding and end-of-text tokens are never taken.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dflash.target.errors import TargetError


def choose_mask_token(model: nn.Module, tokenizer: Any, explicit: int | None = None) -> int:
    """The mask token's id.

    explicit: the recipe's ``drafter.mask_token_id``. Raises TargetError where that has no
    embedding row or is a padding or end token, and where nothing else is free.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    taken = _reserved(model, tokenizer)
    if explicit is not None:
        if not 0 <= explicit < rows:
            raise TargetError(
                f"drafter.mask_token_id={explicit}: the target's embedding has rows 0 to {rows - 1}"
            )
        if explicit in taken:
            raise TargetError(
                f"drafter.mask_token_id={explicit}: is the target's {taken[explicit]} token; the "
                "drafter could not tell it from a mask"
            )
        return explicit
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < rows and own not in taken:
        return int(own)
    first = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    free = [row for row in range(first, rows) if row not in taken]
    if not free:
        raise TargetError(
            f"drafter.mask_token_id: the target has no mask token and none of its {rows} embedding "
            "rows is unused; name a token that never occurs in text"
        )
    return free[0]


def _reserved(model: Any, tokenizer: Any) -> dict[int, str]:
    """Padding and end-of-text ids, by what they are; a config may list several ends."""
    found: dict[int, str] = {}
    for place in (tokenizer, model.config, getattr(model, "generation_config", None)):
        for name, what in (("pad_token_id", "padding"), ("eos_token_id", "end-of-text")):
            ids = getattr(place, name, None)
            for one in ids if isinstance(ids, list | tuple) else [ids]:
                if isinstance(one, int):
                    found[one] = what
    return found
