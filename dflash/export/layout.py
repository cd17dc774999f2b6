"""What the files of an export hold: the fields of the config, the names and shapes of the tensors.

One table for both directions, so that reading refuses exactly what writing does not write.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash.model import DrafterConfig

ARCHITECTURE = "DFlashDraftModel"
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ExportError(Exception):
    """A drafter cannot be exported or read; one line says what does not fit."""


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published tensors: 11 a layer (more with biases) and 3."""
    wide, d = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (wide, config.feature_size),
        "hidden_norm.weight": (wide,),
        "norm.weight": (wide,),
    }
    for layer in range(config.num_hidden_layers):
        matrices = {
            "self_attn.q_proj": (q, wide),
            "self_attn.k_proj": (kv, wide),
            "self_attn.v_proj": (kv, wide),
            "self_attn.o_proj": (wide, q),
            "mlp.gate_proj": (config.intermediate_size, wide),
            "mlp.up_proj": (config.intermediate_size, wide),
            "mlp.down_proj": (wide, config.intermediate_size),
        }
        for name, shape in matrices.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if config.attention_bias and name.startswith("self_attn."):
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        for name, size in (("q_norm", d), ("k_norm", d)):
            shapes[f"layers.{layer}.self_attn.{name}.weight"] = (size,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (wide,)
    return shapes


def published_config(
    config: DrafterConfig, target_config: Any, dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of `config.json`; what readers disagree about is written in every place."""
    text = text_config(target_config)
    name = next((name for name, known in _DTYPES.items() if known == dtype), None)
    if name is None:
        raise ExportError(f"export: dtype {dtype} is not one of {', '.join(_DTYPES)}")
    theta: float | int = config.rope_theta
    theta = int(theta) if float(theta).is_integer() else theta
    layers = config.num_hidden_layers
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "causal": False,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        # Readers of the EAGLE kind count hidden_states, whose first entry is the embedding.
        "eagle_aux_hidden_state_layer_ids": [t + 1 for t in config.target_layer_ids],
        "is_causal": False,
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": name,
    }
    for special in ("bos_token_id", "eos_token_id"):
        if (value := getattr(text, special, None)) is not None:
            fields[special] = value
    return fields


def text_config(target_config: Any) -> Any:
    find = getattr(target_config, "gettext_config", None)
    return find() if callable(find) else target_config
