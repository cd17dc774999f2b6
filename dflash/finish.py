"""What is made of a run when it has ended: its best checkpoint in the published format."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import CheckpointError, CheckpointStore
from dflash.config import load_recipe
from dflash.export import export_drafter
from dflash.model import Drafter, DrafterConfig
from dflash.target.load import load_targets
from dflash.train import RECIPE_FILE


def _chosen(
    folder: Path, say: Callable[[str], object]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    store = CheckpointStore(folder / "checkpoints")
    if best := store.best():
        try:
            return store.load(best)
        except CheckpointError as error:
            say(f"{error}; it was the best, the newest is taken")
    path = store.latest_good(say)
    if path is None:
        raise CheckpointError(f"{folder}: has no checkpoint to export")
    return store.load(path)


def export_run(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    say: Callable[[str], object] = warnings.warn,
) -> Path:
    """Exports the best checkpoint of a run, else the newest intact one, in the published format.

    say: gets one line for each checkpoint that is damaged and passed over.

    Raises:
        CheckpointError, ExportError, TargetError, RecipeError: one line.
    """
    folder = Path(folder)
    tensors, state = _chosen(folder, say)
    recipe = load_recipe(folder / RECIPE_FILE)
    target = load_targets(recipe.target, [torch.device("cpu")])
    drafter = Drafter(DrafterConfig.model_validate(state["drafter"]))
    drafter.load_state_dict(
        {
            name.removeprefix("drafter."): tensor
            for name, tensor in tensors.items()
            if name.startswith("drafter.")
        }
    )
    measured = {}
    if held_out := state.get("held_out"):
        measured = {"optimizer steps": str(state["step"])}
        name = "simulated acceptance length, held-out rows (bonus included)"
        if (at := state.get("held_out_step", state["step"])) != state["step"]:
            name += f", of step {at}"
        measured[name] = f"{held_out['acceptance']:.3f}"
    return export_drafter(
        Path(output) if output is not None else folder / "export",
        drafter,
        target.config,
        tokenizer=target.tokenizer,
        metrics=measured,
    )
