"""Writing an export: weights, model card, and last the config that makes the folder a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dflash
from dflash import disk
from dflash.export.layout import CARD, CONFIG, WEIGHTS, ExportError, published_config, text_config
from dflash.model import Drafter, DrafterConfig


def export_drafter(
    folder: str | Path,
    drafter: Drafter,
    target_config: Any,
    *,
    tokenizer: Any | None = None,
    metrics: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write the drafter into `folder` (made if needed; an earlier export there is replaced).

    target_config: the target's Hugging Face config, with which the drafter has to agree.
    tokenizer: saved beside it where given. metrics: name -> value, the card's table of measured
    acceptance (`EvalReport.card_metrics`).

    Raises ExportError.
    """
    folder, config = Path(folder), drafter.config
    text = text_config(target_config)
    _check_target(config, text)
    published = json.dumps(published_config(config, target_config, dtype), indent=2) + "\n"
    tensors = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / (WEIGHTS + ".part")
        disk.write_tensors(part, tensors, {"format": "pt"})
        disk.sync(part)
        disk.rename(part, folder / WEIGHTS)
        card = model_card(config, getattr(target_config, "_name_or_path", ""), metrics or {})
        disk.replace_file(folder / CARD, card.encode())
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        disk.replace_file(folder / CONFIG, published.encode())  # last: it makes a folder a model
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder


def model_card(config: DrafterConfig, target: str, metrics: Mapping[str, Any]) -> str:
    """README.md: what this is, what it needs, and how it was measured."""
    base = f"base_model: {target}\n" if target and not Path(target).is_absolute() else ""
    lines = [
        f"---\n{base}library_name: transformers\ntags:\n- dflash\n- speculative-decoding\n---",
        "",
        "# DFlash drafter",
        "",
        f"A block drafter for speculative decoding (DFlash, arXiv 2602.06036) of "
        f"{'`' + target + '`' if base else 'its target model'}. It has no embedding and no output "
        f"head: both are the target's.",
        "",
        "| | |",
        "|---|---|",
        f"| block size | {config.block_size} (proposes {config.block_size - 1} tokens a pass) |",
        f"| target layers (0-based decoder layers, output) | {list(config.target_layer_ids)} |",
        f"| mask token id | {config.mask_token_id} |",
        f"| drafter layers | {config.num_hidden_layers} |",
        "| attention inside a block | not causal, all layers |",
        "",
        "## Measured acceptance",
        "",
    ]
    if metrics:
        lines += [
            "Acceptance lengths are tokens committed per verify pass, **bonus token included**.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in metrics.items()),
        ]
    else:
        lines.append("Not measured.")
    if config.num_target_layers - 1 in config.target_layer_ids:
        lines += [
            "",
            "Note: the last target layer is among the features, taken *before* the final norm. An "
            "engine that takes the last entry of `output_hidden_states` gets it after the norm.",
        ]
    lines += ["", f"Written by dflash-trainer {dflash.__version__}.", ""]
    return "\n".join(lines)


def _check_target(config: DrafterConfig, text: Any) -> None:
    if config.hidden_size != config.target_hidden_size:
        raise ExportError(
            f"export: hidden_size {config.hidden_size} differs from the target's "
            f"{config.target_hidden_size}: the published format has one size for both"
        )
    for name, mine in (
        ("hidden_size", config.target_hidden_size),
        ("num_hidden_layers", config.num_target_layers),
        ("vocab_size", config.vocab_size),
    ):
        theirs = getattr(text, name, None)
        if theirs != mine:
            raise ExportError(
                f"export: the drafter is for a target with {name} {mine}, this one has {theirs}"
            )
