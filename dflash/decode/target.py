"""The target while it decodes one text: its key/value cache, its logits, its features.

Works with any Hugging Face causal LM whose cache can be cropped. Not covered: linear-attention
and other recurrent targets, whose state a crop does not bring back: they are refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from dflash.target.capture import capturing, forward_with_features


class DecodeError(Exception):
    """This target, drafter or prompt cannot be decoded; one line says why."""


class TargetSession:
    """One text in one target. `length` positions are in the cache.

    target_layer_ids: capture their features at every pass; empty = none. As a context manager it
    keeps the capture in place between the passes.
    """

    def __init__(self, model: nn.Module, target_layer_ids: Sequence[int] = ()) -> None:
        self.model = model
        self._ids = tuple(target_layer_ids)
        config: Any = model.config
        self._cache = DynamicCache(config=config)
        if hasattr(self._cache, "activate_past_recording"):
            self._cache.activate_past_recording()  # lets windowed layers be cropped
        names = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in names
        self._held = contextlib.ExitStack()
        self.length = 0

    def __enter__(self) -> TargetSession:
        if self._ids:
            self._held.enter_context(capturing(self.model))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def run(self, token_ids: Tensor, keep: int) -> tuple[Tensor, Tensor | None]:
        """Append tokens [1, T] and return the logits after the last `keep` of them, and features.

        Returns ([keep, V], [1, T, K*H_t] or None).
        """
        arguments: dict[str, Any] = {
            "input_ids": token_ids,
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        features = None
        if self._ids:
            output, features = forward_with_features(self.model, self._ids, **arguments)
        else:
            output = self.model(**arguments)
        self.length += token_ids.shape[1]
        logits: Tensor = output.logits[0, -keep:]
        return logits, features

    def crop(self, length: int) -> None:
        """Forget everything from position `length` on.

        Raises DecodeError where the cache does not come back to that length.
        """
        remove = self.length - length
        if remove > 0:
            if not getattr(self._cache, "is_croppable", True):
                raise DecodeError(
                    f"{type(self.model).__name__}: its cache cannot be rolled back (recurrent "
                    f"layers): speculative decoding would not be lossless"
                )
            self._cache.crop(-remove)
            self.length = length
        if self._cache.get_seq_length() != self.length:
            raise DecodeError(
                f"{type(self.model).__name__}: its cache holds {self._cache.get_seq_length()} "
                f"positions where {self.length} were expected: it cannot be cropped"
            )
