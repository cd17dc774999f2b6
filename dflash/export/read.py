"""Reading an export, of this trainer or another, strictly: nothing guessed, nothing left over."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.export.layout import ARCHITECTURE, CONFIG, WEIGHTS, ExportError, tensor_shapes
from dflash.model import DrafterConfig


def load_exported(folder: str | Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read an export of this or another trainer: its config, and its tensors as they are stored.

    Raises ExportError where anything is missing, unknown, of another shape, or asks for a
    computation that this drafter does not do.
    """
    folder = Path(folder)
    raw = _read_config(folder / CONFIG)
    config = _drafter_config(folder / CONFIG, raw)
    path, expected = folder / WEIGHTS, tensor_shapes(config)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_tensors(path, found, expected)
            return config, {name: file.get_tensor(name) for name in expected}
    except FileNotFoundError:
        raise ExportError(f"{path}: is missing") from None
    except (OSError, SafetensorError) as error:
        said = " ".join(str(error).split())
        raise ExportError(f"{path}: cannot be read: {said}") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ExportError(f"{path}: is missing: not an exported drafter") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or "not JSON"
        raise ExportError(f"{path}: cannot be read: {said}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("dflash_config", {}), dict):
        raise ExportError(f"{path}: is not a config: expected a mapping")
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ExportError(
            f"{path}: architectures is {raw.get('architectures')}, not ['{ARCHITECTURE}']"
        )
    return raw


def _drafter_config(path: Path, raw: dict[str, Any]) -> DrafterConfig:
    inner = raw.get("dflash_config", {})

    def item(name: str, default: Any = None) -> Any:
        """As the engines read: inside `dflash_config` first, then at the top."""
        value = inner.get(name, raw.get(name, default))
        if value is None:
            raise ExportError(f"{path}: has no {name}")
        return value

    layers = item("num_hidden_layers")
    _refuse_other_kinds(path, raw, inner)
    wide = item("hidden_size")
    fields = {
        "hidden_size": wide,
        "target_hidden_size": wide,
        "num_hidden_layers": layers,
        "block_size": item("block_size", 16),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "attention_bias": raw.get("attention_bias", False),
        "initializer_range": raw.get("initializer_range", 0.02),
        "max_position_embeddings": raw.get("max_position_embeddings", 40960),
    }
    for name in (
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_target_layers",
        "target_layer_ids",
        "mask_token_id",
        "vocab_size",
    ):
        fields[name] = item(name)
    parameters = raw.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ExportError(f"{path}: names no rope_theta, at the top or in rope_parameters")
    if raw.get("rope_theta", theta) != theta:
        raise ExportError(
            f"{path}: rope_theta is {raw['rope_theta']} at the top and {theta} in rope_parameters"
        )
    try:
        return DrafterConfig(rope_theta=theta, **fields)
    except ValueError as error:
        raise ExportError(f"{path}: {error}") from None


def _refuse_other_kinds(path: Path, raw: dict[str, Any], inner: dict[str, Any]) -> None:
    """What would be computed otherwise by the drafter that wrote this."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kinds = {
        "model_type": (raw.get("model_type", "qwen3"), "qwen3"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "rope_type": (scaling.get("rope_type", "default"), "default"),
        "is_causal": (bool(raw.get("is_causal", inner.get("causal", False))), False),
        "use_swa": (bool(inner.get("use_swa", False)), False),
        "layer_types": (
            sorted(set(raw.get("layer_types") or ["full_attention"])),
            ["full_attention"],
        ),
        "input_embedding_scale": (inner.get("input_embedding_scale") or 1.0, 1.0),
        "output_multiplier": (inner.get("output_multiplier") or 1.0, 1.0),
        "final_logit_softcapping": (inner.get("final_logit_softcapping") or None, None),
    }
    for name, (value, known) in kinds.items():
        if value != known:
            raise ExportError(f"{path}: {name} {value} is not supported, only {known}")


def _check_tensors(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    wrong = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("unknown", extra), ("of a wrong shape", wrong))
        if names
    ]
    if faults:
        raise ExportError(f"{path}: tensors do not fit the config: {'; '.join(faults)}")


def _some(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
