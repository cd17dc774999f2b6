"""``dflash plan``: everything that a run needs is looked at, nothing is trained."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter

import torch

from dflash.config import Recipe
from dflash.data import bad_line_report, build_rows
from dflash.export import load_exported, tensor_shapes
from dflash.regenerate import choose_prompts
from dflash.schedule.topology import Topology
from dflash.target.load import Targets, load_targets
from dflash.train import drafter_config

_GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A trained parameter: weight, gradient and, on the master, two moments, all fp32.
_REPLICA_BYTES, _MASTER_BYTES = 8, 8


def make_plan(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Lines that say what the run would do, and problems that would stop it."""
    topology = Topology.of(recipe.schedule)
    problems = [f"this machine has no {name}" for name in topology.missing()]
    target = load_targets(recipe.target, [torch.device("cpu")])
    target_size = sum(parameter.numel() for parameter in target.model.parameters())
    config = drafter_config(recipe, target)
    rows, said = _text(recipe, target)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    per_step = len(topology.drafters) * recipe.optimizer.accumulation
    steps = recipe.run.steps or math.ceil((recipe.run.epochs or 0) * rows / per_step)
    item = _BYTES[recipe.target.dtype]
    features = recipe.data.row_length * config.feature_size * item
    slots = recipe.data.anchors_per_row * config.block_size
    chunk = min(recipe.objective.head_chunk_slots, slots) * config.vocab_size * 4
    lines = [
        *topology.lines(),
        f"target {recipe.target.path}: {target_size:,} parameters, {recipe.target.dtype}, "
        f"{recipe.target.placement}",
        f"drafter: {parameters:,} parameters, {config.num_hidden_layers} layers, block "
        f"{config.block_size}, features of layers {list(config.target_layer_ids)}, mask token "
        f"{config.mask_token_id}",
        *said,
        f"{steps} steps of {per_step} packets; {features / 2**20:.2f} MiB of features a packet",
        f"shapes: row {recipe.data.row_length}, {recipe.data.anchors_per_row} anchors, "
        f"{slots} block slots; attention [{slots}, {recipe.data.row_length + slots}]",
        f"compiles: flex_attention once for each of {len(topology.drafters)} drafters in training"
        + (", once in evaluation" if recipe.data.held_out and recipe.run.evaluate_rows else ""),
    ]
    lines += _memory(recipe, topology, target_size * item, parameters, chunk)
    if rows < per_step:
        lines.append(f"note: {rows} rows are fewer than the {per_step} packets of one step")
    if recipe.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        lines.append("note: tensorboard is not installed; metrics.jsonl has all the numbers")
    if recipe.drafter.initial is not None and load_exported(recipe.drafter.initial)[0] != config:
        problems.append(f"drafter.initial: {recipe.drafter.initial} is of another shape")
    return lines, problems


def _text(recipe: Recipe, target: Targets) -> tuple[int, list[str]]:
    """Number of training rows, at most where the target writes them first; lines about them."""
    data, how = recipe.data, recipe.data.regenerate
    if how is None:
        rows, report = build_rows(data, target.tokenizer, seed=recipe.run.seed)
        return len(rows), [*report.lines(), *_held_out(recipe, target)]
    prompts, bad = choose_prompts(
        data, data.train, target.tokenizer, how, how.prompts, recipe.run.seed
    )
    tokens = sum(len(prompt.ids) + how.new_tokens for prompt in prompts)
    most = math.ceil(tokens / data.row_length)
    heat = ", ".join(f"{temperature:g}" for temperature in how.temperatures)
    return most, [
        f"{', '.join(data.train)}: {len(prompts)} prompts; from each the target first writes up to "
        f"{how.new_tokens} tokens, at temperature {heat}",
        f"about {most} rows of {data.row_length} tokens",
        *bad,
        *_held_out(recipe, target),
    ]


def _held_out(recipe: Recipe, target: Targets) -> list[str]:
    """A line about the held-out text; whatever is wrong with it is raised as a run would."""
    data, how = recipe.data, recipe.data.regenerate
    if not data.held_out:
        return ["held out: nothing, so no checkpoint is the best and the newest is exported"]
    if how is None:
        rows, report = build_rows(
            data, target.tokenizer, seed=recipe.run.seed, paths=data.held_out, shuffle=False
        )
        looked_at = min(len(rows), recipe.run.evaluate_rows)
        return [
            f"held out: {report.lines()[0]}; {looked_at} of {len(rows)} rows in each evaluation",
            *bad_line_report(report.bad_lines, report.first_bad),
        ]
    prompts, bad = choose_prompts(
        data, data.held_out, target.tokenizer, how, how.held_out_prompts, recipe.run.seed
    )
    return [f"held out: {', '.join(data.held_out)}: {len(prompts)} prompts", *bad]


def _memory(
    recipe: Recipe, topology: Topology, target_bytes: int, parameters: int, chunk: int
) -> list[str]:
    need: Counter[str] = Counter()
    held = set()
    for place in topology.targets:
        name = str(place.device)
        if recipe.target.placement == "replica" and name not in held:
            need[name] += target_bytes  # one copy, however many workers share it
            held.add(name)
        elif recipe.target.placement == "sharded":
            need[name] += target_bytes // len(topology.targets)
    for index, place in enumerate(topology.drafters):
        need[str(place.device)] += parameters * (
            _REPLICA_BYTES + (_MASTER_BYTES if not index else 0)
        )
        # Logits of a chunk, and their gradient; the same of a teacher's, and its distribution.
        need[str(place.device)] += (4 if recipe.objective.teacher_share else 2) * chunk
    return [
        f"memory on {name}: at least {bytes_ / _GIB:.2f} GiB (weights, gradients, optimizer, "
        "logits of a chunk; activations come on top)"
        for name, bytes_ in sorted(need.items())
    ]
