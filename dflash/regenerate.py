"""Training text in the target's own words: prompts from the data, continuations by the target.

A drafter has to predict what the target would say, not what a person wrote, so the target writes
the text it is trained on (DFlash, arXiv 2602.06036, training data). Of a conversation the last
supervised turn is written anew, of a text a window somewhere in it goes on. Prompts, places and
draws depend on the seed and the sample alone, whatever the number of devices.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash import disk
from dflash.config import DataSettings, Recipe, RecipeError, RegenerateSettings, make_recipe
from dflash.data import (
    BadLine,
    DataError,
    Document,
    bad_line_report,
    read_samples,
    refuse_bad_line,
    render_sample,
)
from dflash.decode.batch import continue_batch
from dflash.schedule import Topology
from dflash.seeds import stable_seed
from dflash.target.load import Targets, load_targets

_BAD_LINES_SHOWN = 10


@dataclass(frozen=True)
class Prompt:
    """Token ids to go on from. where: "file:line" of the sample; number: of the prompt."""

    number: int
    ids: list[int]
    where: str


def regenerate(
    settings: DataSettings,
    paths: Sequence[str | Path],
    target: Targets,
    output: Path,
    *,
    prompts: int,
    seed: int,
    threads: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Writes ``prompts`` records {input_ids, prompt_length, temperature, source}; returns tokens.

    Each physical target device works on batches of its own, in a thread of its own. The file
    appears whole or not at all.

    threads: intra-op threads of each, on a CPU. say: told which lines of the data are skipped.

    Raises:
        DataError: no usable prompt, or a bad line where the recipe says that this is fatal.
        OSError: the file cannot be written.
    """
    how = settings.regenerate
    assert how is not None
    todo, bad = choose_prompts(settings, paths, target.tokenizer, how, prompts, seed)
    for line in bad:
        say(line)
    # Prompts of like length side by side: padding costs as much as tokens.
    order = sorted(todo, key=lambda prompt: (len(prompt.ids), prompt.number))
    batches = [order[at : at + how.batch_size] for at in range(0, len(order), how.batch_size)]
    written: dict[int, str] = {}
    tokens, stop, lock = 0, threading.Event(), threading.Lock()
    eos = target.tokenizer.eos_token_id
    models = list({id(replica): replica.model for replica in target.replicas}.values())
    if len(models) == 1 and next(models[0].parameters()).device.type == "cpu":
        models *= min(len(target.replicas), os.cpu_count() or 1)  # one copy serves all cores

    def work(index: int) -> None:
        nonlocal tokens
        torch.set_num_threads(threads)  # belongs to the thread that sets it
        for batch in batches[index :: len(models)]:
            heat = [how.temperatures[prompt.number % len(how.temperatures)] for prompt in batch]
            rows = continue_batch(
                models[index],
                [prompt.ids for prompt in batch],
                max_new_tokens=how.new_tokens,
                temperatures=heat,
                stop_token_ids=() if eos is None else (eos,),
                seed=stable_seed("regenerate", seed, batch[0].number),
                go_on=lambda: not stop.is_set(),
            )
            if stop.is_set():
                return
            with lock:
                for prompt, row, temperature in zip(batch, rows, heat, strict=True):
                    written[prompt.number] = _record(prompt, row, temperature)
                    tokens += len(row)
                on_progress(len(written), len(todo))

    with ThreadPoolExecutor(len(models), thread_name_prefix="regenerate") as pool:
        try:
            running = [pool.submit(work, index) for index in range(len(models))]
            for future in as_completed(running):  # the first failure, whoever has it
                future.result()
        finally:
            stop.set()
    output.parent.mkdir(parents=True, exist_ok=True)
    disk.replace_file(output, "".join(written[n] for n in sorted(written)).encode())
    return tokens


def regenerate_recipe(recipe: Recipe, output: Path, *, say: Callable[[str], None]) -> int:
    """Regenerates a recipe's ``data.train`` into ``output``; returns the number of new tokens.

    Raises RecipeError, DataError, TargetError: bad input, one line.
    """
    how = recipe.data.regenerate or RegenerateSettings()
    recipe = make_recipe(
        recipe.model_dump() | {"data": recipe.data.model_dump() | {"regenerate": how.model_dump()}}
    )
    topology = Topology.of(recipe.schedule)
    if missing := topology.missing():
        raise RecipeError(
            f"schedule: this machine has no {', '.join(missing)}; name other target devices"
        )
    if output.is_dir():
        raise RecipeError(f"{output}: is a folder; name a file")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        target = load_targets(recipe.target, [place.device for place in topology.targets])
        return regenerate(
            recipe.data, recipe.data.train, target, output,
            prompts=how.prompts, seed=recipe.run.seed,
            threads=recipe.schedule.threads_per_worker,
            on_progress=_saying("train", say), say=say,
        )  # fmt: skip
    except OSError as error:
        raise RecipeError(f"{output}: cannot be written ({error.strerror})") from error


def own_text(
    recipe: Recipe, target: Targets, folder: Path, *, again: bool, say: Callable[[str], None]
) -> tuple[Path, Path | None]:
    """A run's training and held-out text by the target, as files below ``folder``.

    again: write them anew; else what an earlier start of the same run left is used.
    """
    data, how = recipe.data, recipe.data.regenerate
    assert how is not None
    files: list[Path] = []
    for name, paths, count in (
        ("train", data.train, how.prompts),
        ("held_out", data.held_out, how.held_out_prompts),
    ):
        path = folder / "data" / f"{name}.jsonl"
        if paths and (again or not path.is_file()):
            regenerate(
                data, paths, target, path, prompts=count, seed=recipe.run.seed,
                threads=recipe.schedule.threads_per_worker, on_progress=_saying(name, say),
                say=say,
            )  # fmt: skip
        if paths:
            files.append(path)
    return files[0], files[1] if len(files) > 1 else None


def _saying(name: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """A line every few seconds."""
    begun = said = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done == of or now - said > 5:
            said = now
            say(f"{name}: the target has gone on from {done} of {of} prompts ({now - begun:.0f} s)")

    return progress


def choose_prompts(
    settings: DataSettings,
    paths: Sequence[str | Path],
    tokenizer: Any,
    how: RegenerateSettings,
    count: int,
    seed: int,
) -> tuple[list[Prompt], list[str]]:
    """``count`` prompts, spread evenly over the documents; more than one of a document if needed.

    And lines about bad lines, which are skipped. Raises DataError where no document has a prompt,
    or for the first bad line where the recipe says so.
    """
    documents: list[Document] = []
    bad: list[BadLine] = []
    for sample in read_samples(paths, settings.format):
        item: Document | BadLine = (
            sample if isinstance(sample, BadLine) else render_sample(sample, tokenizer, "last_turn")
        )
        if isinstance(item, BadLine):
            refuse_bad_line(item, settings)
            bad.append(item)
        elif len(item.input_ids) > 1:
            documents.append(item)
    prompts: list[Prompt] = []
    for number in range(count):
        if not documents:
            break
        # The golden ratio's multiples fill the documents evenly for every count.
        place = int((number * 0.6180339887498949 % 1.0) * len(documents))
        ids = _prompt(documents[place], how, stable_seed("prompt", seed, number))
        if ids:
            prompts.append(Prompt(number, ids, documents[place].where))
    if not prompts:
        first = f" (bad lines: {len(bad)}, the first {bad[0]})" if bad else ""
        raise DataError(
            f"{', '.join(map(str, paths))}: no document to take prompts from{first}; check "
            "data.train, data.held_out and data.format"
        )
    return prompts, bad_line_report(len(bad), bad[:_BAD_LINES_SHOWN])


def _prompt(document: Document, how: RegenerateSettings, draw: int) -> list[int]:
    """A conversation up to its last answer, or a window of a text."""
    ids: list[int] = document.input_ids.tolist()
    mask: list[bool] = document.loss_mask.tolist()
    if not all(mask):
        answer = mask.index(True) if True in mask else len(mask)
        return ids[:answer][-how.max_prompt_tokens :]
    last = max(0, len(ids) - how.prompt_tokens)
    # Beginnings and ends are rare places in a text, and not rare in use.
    begin = {0: 0, 1: last}.get(draw % 8, (draw >> 3) % (last + 1))
    return ids[begin : begin + how.prompt_tokens]


def _record(prompt: Prompt, row: list[int], temperature: float) -> str:
    record = {
        "input_ids": [*prompt.ids, *row],
        "prompt_length": len(prompt.ids),
        "temperature": temperature,
        "source": prompt.where,
    }
    return json.dumps(record, separators=(",", ":")) + "\n"
