"""After the run: the curves, and what the drafter does for the target."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash.config import RecipeError, load_recipe
from dflash.data import DataError
from dflash.decode import speculative_decode
from dflash.evaluate import EvalReport, evaluate
from dflash.export import load_exported
from dflash.model import Drafter
from dflash.prompts import PROMPT_TOKENS, read_prompts
from dflash.schedule.metrics import read_metrics
from dflash.target.load import Targets, load_targets
from dflash.train import RECIPE_FILE


def draw_curves(folder: str | Path) -> Path:
    """Loss and simulated acceptance over the steps, as ``curves.png`` in the run's folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    lines = read_metrics(folder)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, name in ((left, "loss"), (right, "acceptance")):
        for kind, style in (("train", {"linewidth": 1}), ("held_out", {"marker": "o"})):
            # By step: what a resumed run did again counts with its last numbers.
            points = {line["step"]: line[name] for line in lines if line["kind"] == kind}
            if points:
                axis.plot(
                    *zip(*sorted(points.items()), strict=True),
                    label=kind.replace("_", "-"),
                    **style,
                )
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.legend()
    left.set_yscale("log")  # the first steps would flatten all the others
    left.set_ylabel("loss [nats]")
    right.set_ylabel("acceptance length [tokens]")
    right.set_title("simulated, bonus token included", fontsize="medium")
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def evaluate_run(
    folder: str | Path,
    prompts: str | Path | None,
    *,
    temperature: float,
    rule: str,
    max_new_tokens: int,
    prompt_tokens: int = PROMPT_TOKENS,
) -> EvalReport:
    """Decodes every prompt with and without the run's exported drafter.

    prompts: a file, folder or named source; None: the recipe's ``data.held_out``.

    Raises:
        RecipeError, DataError, DecodeError: bad input, one line.
    """
    target, drafter = _load(Path(folder))
    paths = [prompts] if prompts else load_recipe(Path(folder) / RECIPE_FILE).data.held_out
    if not paths:
        raise RecipeError(f"{folder}: its recipe has no data.held_out; name files with --prompts")
    eos = target.tokenizer.eos_token_id
    return evaluate(
        target.model,
        drafter,
        read_prompts(paths, target.tokenizer, prompt_tokens=prompt_tokens),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        rule=rule,
        stop_token_ids=() if eos is None else (eos,),
    )


def generate_text(
    folder: str | Path, prompt: str, *, temperature: float, rule: str, max_new_tokens: int
) -> tuple[str, str]:
    """The continuation of ``prompt``, and one line about how it was decoded."""
    target, drafter = _load(Path(folder))
    ids = target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError("generate: the prompt is empty")
    eos = target.tokenizer.eos_token_id
    decoded = speculative_decode(
        target.model,
        drafter,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        rule=rule,
        stop_token_ids=() if eos is None else (eos,),
    )
    stats = decoded.stats
    line = f"{len(decoded.tokens)} tokens in {stats.passes} passes, tau {stats.tau:.2f}"
    return target.tokenizer.decode(decoded.tokens), line


def _load(folder: Path) -> tuple[Targets, Drafter]:
    if not (folder / RECIPE_FILE).exists():
        raise RecipeError(f"{folder}: is not a run (it has no {RECIPE_FILE})")
    if not (folder / "export").is_dir():
        raise RecipeError(f"{folder}: has no export; make one with 'dflash export {folder}'")
    recipe = load_recipe(folder / RECIPE_FILE)
    config, weights = load_exported(folder / "export")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        # One token at a time gives more threads nothing to do but wait for each other.
        torch.set_num_threads(recipe.schedule.threads_per_worker)
    target = load_targets(recipe.target, [device])
    drafter = Drafter(config)
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return target, drafter.to(device).eval()
