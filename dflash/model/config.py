"""The drafter's shape, as one frozen and validated record.

Covers every number that fixes a parameter's shape or the computation, and the rule that chooses
target layers. Does not cover reading or writing published config files (`dflash.export`), nor
sliding windows, rope scaling and partial rotary: the drafter rotates whole heads with plain RoPE.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


def default_target_layer_ids(num_target_layers: int, n: int) -> tuple[int, ...]:
    """Choose `n` decoder layers, evenly spaced from layer 1 to layer `num_target_layers - 3`.

    The i-th id is `round(1 + i * (num_target_layers - 4) / (n - 1))`, halves to even; one layer
    alone is the middle one. "Features between the second and the third-from-last target layer":
    DFlash, arXiv 2602.06036; the rounding is that of the released drafters' configs.

    Raises ValueError where the target is too shallow for `n` different layers.
    """
    if n < 1:
        raise ValueError(f"num_features must be at least 1, got {n}")
    if n == 1:
        ids = [num_target_layers // 2]
    else:
        ids = [round(1 + i * (num_target_layers - 4) / (n - 1)) for i in range(n)]
    in_range = all(0 <= t < num_target_layers for t in ids)
    if not in_range or any(low >= high for low, high in itertools.pairwise(ids)):
        raise ValueError(
            f"num_features={n} is too many for the default rule on a target of "
            f"{num_target_layers} layers: ask for fewer, or give target_layer_ids"
        )
    return tuple(ids)


class DrafterConfig(BaseModel):
    """Shapes and constants of one drafter (DFlash, arXiv 2602.06036; field names are Qwen3's).

    A `target_layer_ids` entry t is a 0-based decoder layer; its feature is the residual stream
    *leaving* that layer. Their order is the order of the features' columns. There need not be as
    many of them as drafter layers. `hidden_size` equals `target_hidden_size` wherever the
    target's embedding and head are shared, as in all released drafters.

    `rope_theta` has no default on purpose: a wrong base ruins acceptance without any error.

    Raises ValueError (one line, naming the field) on construction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    target_hidden_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    block_size: int = Field(ge=2)
    mask_token_id: int = Field(ge=0)
    vocab_size: int = Field(ge=1)
    rope_theta: float = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    attention_bias: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    max_position_embeddings: int = Field(default=40960, ge=1)

    def __init__(self, **data: Any) -> None:
        # pydantic's own report takes three lines an error; whoever reads a crash log wants one.
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ValueError(_one_line(error, tuple(type(self).model_fields))) from None

    @model_validator(mode="after")
    def _fields_agree(self) -> DrafterConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates two halves")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} has no embedding row: "
                f"it must be below vocab_size={self.vocab_size}"
            )
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)} names a layer twice: "
                f"give each once"
            )
        outside = [t for t in self.target_layer_ids if not 0 <= t < self.num_target_layers]
        if outside:
            raise ValueError(
                f"target_layer_ids has {outside}, outside [0, {self.num_target_layers - 1}] of "
                f"this target: ids are 0-based decoder layers, not hidden_states indices"
            )
        return self

    @property
    def num_features(self) -> int:
        """K: how many target layers a feature row holds."""
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """K * H_t: the width of one feature row, and the input width of `fc`."""
        return self.num_features * self.target_hidden_size

    @classmethod
    def for_target(
        cls,
        hf_config: Any,
        *,
        num_hidden_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...] | list[int] | None = None,
        num_features: int | None = None,
        **overrides: Any,
    ) -> DrafterConfig:
        """Shape a drafter after a Hugging Face target config.

        Widths, heads, vocabulary and the rope base are the target's unless named in `overrides`
        (any field of this class). Layers: `target_layer_ids`, or else the default rule for
        `num_features` layers, or else for as many as the drafter has layers. A mixture of experts
        without a dense width gets an MLP of three times the hidden size.

        Raises ValueError where the target lacks a value that `overrides` does not give.
        """
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        depth = int(_read(text, "num_hidden_layers"))
        if target_layer_ids is not None:
            if num_features is not None and num_features != len(target_layer_ids):
                raise ValueError(
                    f"num_features={num_features} but target_layer_ids has "
                    f"{len(target_layer_ids)}: give one of the two"
                )
            ids = tuple(target_layer_ids)
        else:
            wanted = num_hidden_layers if num_features is None else num_features
            ids = default_target_layer_ids(depth, wanted)
        width = int(_read(text, "hidden_size"))
        heads = int(_read(text, "num_attention_heads"))
        fields: dict[str, Any] = {
            "hidden_size": width,
            "intermediate_size": getattr(text, "intermediate_size", None) or 3 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or width // heads,
            "target_hidden_size": width,
            "num_target_layers": depth,
            "vocab_size": _read(text, "vocab_size"),
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "initializer_range": getattr(text, "initializer_range", None) or 0.02,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 40960,
        }
        if "rope_theta" not in overrides:
            fields["rope_theta"] = _rope_theta(text)
        fields.update(overrides)
        return cls(
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=ids,
            **fields,
        )


def _read(hf_config: Any, name: str) -> Any:
    value = getattr(hf_config, name, None)
    if value is None:
        raise ValueError(
            f"target config {type(hf_config).__name__} has no {name}: not a text model"
        )
    return value


def _rope_theta(hf_config: Any) -> float:
    """Read the rope base from `rope_parameters` (transformers >= 5) or `rope_theta` (before)."""
    parameters = getattr(hf_config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        if "rope_theta" in parameters:
            return float(parameters["rope_theta"])
        # Targets that mix layer types keep one entry for each; the drafter's layers are all full.
        full = parameters.get("full_attention")
        if isinstance(full, Mapping) and "rope_theta" in full:
            return float(full["rope_theta"])
    theta = getattr(hf_config, "rope_theta", None)
    if theta is None:
        raise ValueError(
            f"target config {type(hf_config).__name__} names no rope base: pass rope_theta"
        )
    return float(theta)


def _one_line(error: ValidationError, fields: tuple[str, ...]) -> str:
    """Say the first fault of a pydantic report in one line, with the field's name in it."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"drafter config: unknown field {name!r}{hint}"
    if first["type"] == "missing":
        return f"drafter config: {name} is required"
    if not name:  # raised by the cross-field check, which names the fields itself
        return f"drafter config: {first['ctx']['error']}"
    return f"drafter config: {name}={first['input']!r}: {first['msg']}"
