"""Text by the target itself: what is gone on from, what is written, what a run makes of it."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

from dflash.cli import app
from dflash.config import make_recipe
from dflash.data import DataError, build_rows
from dflash.regenerate import choose_prompts, own_text, regenerate
from dflash.target.load import Targets, load_targets
from dflash.target.tiny import TinySettings, make_tiny_target

HOW = {"prompts": 6, "held_out_prompts": 2, "prompt_tokens": 8, "new_tokens": 10, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = TinySettings(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        tokens_per_step=128, row_tokens=64, long_row_tokens=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target") / "tiny"
    make_tiny_target(folder, steps=1, settings=settings, say=lambda line: None)
    return folder


@pytest.fixture
def recipe(folder, tmp_path):
    def make(**regenerate):
        for n in range(3):
            (tmp_path / f"text{n}.txt").write_text(f"{n}: " + "the quick brown fox " * 9)
        return make_recipe(
            {
                "target": {"path": str(folder), "dtype": "float32"},
                "data": {
                    "train": [str(tmp_path / "text0.txt"), str(tmp_path / "text1.txt")],
                    "held_out": [str(tmp_path / "text2.txt")],
                    "row_length": 24,
                    "regenerate": HOW | regenerate,
                },
                "schedule": {"targets": ["cpu:0", "cpu:1"], "drafters": ["cpu:2"]},
                "run": {"steps": 1},
            }
        )

    return make


def write(recipe, path, devices=2, **arguments):
    target = load_targets(recipe.target, [torch.device("cpu")] * devices)
    count = regenerate(recipe.data, recipe.data.train, target, path, prompts=6, seed=0, **arguments)
    return [json.loads(line) for line in path.read_text().splitlines()], count


def test_records_hold_prompt_and_continuation_in_the_prompts_order(recipe, tmp_path):
    records, tokens = write(recipe(), tmp_path / "out.jsonl")
    assert len(records) == 6 and [r["temperature"] for r in records] == [0.0, 1.0] * 3
    assert tokens == sum(len(r["input_ids"]) - r["prompt_length"] for r in records)
    assert all(r["prompt_length"] == 8 for r in records)
    assert {r["source"] for r in records} == {f"{tmp_path}/text{n}.txt:1" for n in (0, 1)}


def test_the_number_of_devices_does_not_change_the_text(recipe, tmp_path):
    one, _ = write(recipe(), tmp_path / "one.jsonl", devices=1)
    two, _ = write(recipe(), tmp_path / "two.jsonl", devices=2)
    assert one == two


def test_only_the_continuation_is_learnt(recipe, tmp_path):
    recipe = recipe()
    records, _ = write(recipe, tmp_path / "out.jsonl")
    target = load_targets(recipe.target, [torch.device("cpu")])
    rows, _ = build_rows(
        recipe.data, target.tokenizer, seed=0, paths=[tmp_path / "out.jsonl"], shuffle=False
    )
    row = rows.rows[0]
    size = len(records[0]["input_ids"])
    assert row.input_ids[:size].tolist() == records[0]["input_ids"]
    assert row.loss_mask[:size].tolist() == [False] * 8 + [True] * (size - 8)


def test_an_answer_of_a_conversation_is_written_anew(recipe, folder, tmp_path):
    """The prompt is all up to the last answer; a prompt that is too long keeps its end."""
    recipe = recipe(max_prompt_tokens=12)
    tokenizer = load_targets(recipe.target, [torch.device("cpu")]).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path = tmp_path / "chat.jsonl"
    turns = [("user", "hello"), ("assistant", "yes"), ("user", "and"), ("assistant", "no")]
    messages = [{"role": role, "content": said} for role, said in turns]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    how = recipe.data.regenerate
    ((prompt,), _) = choose_prompts(recipe.data, [path], tokenizer, how, 1, seed=0)
    whole = "<user>hello;<assistant>yes;<user>and;<assistant>"
    assert tokenizer.decode(prompt.ids) == whole[-12:]


def test_prompts_reach_every_document_and_both_ends_of_a_text(recipe, tmp_path):
    recipe = recipe()
    tokenizer = load_targets(recipe.target, [torch.device("cpu")]).tokenizer
    prompts, _ = choose_prompts(
        recipe.data, recipe.data.train, tokenizer, recipe.data.regenerate, 64, seed=0
    )
    said = [tokenizer.decode(prompt.ids) for prompt in prompts]
    assert {p.where for p in prompts} == {f"{tmp_path}/text{n}.txt:1" for n in (0, 1)}
    assert any(text.startswith(("0: ", "1: ")) for text in said)
    assert len(set(said)) > 10


def test_nothing_to_go_on_from_is_one_line(recipe, tmp_path):
    recipe = recipe()
    (tmp_path / "empty.txt").write_text("")
    target = load_targets(recipe.target, [torch.device("cpu")])
    with pytest.raises(DataError, match="no document to take prompts from"):
        regenerate(recipe.data, [tmp_path / "empty.txt"], target, tmp_path / "o", prompts=1, seed=0)
    assert not (tmp_path / "o").exists()


def test_a_run_writes_its_text_once_and_a_resumed_one_uses_it(recipe, tmp_path):
    recipe = recipe()
    target = load_targets(recipe.target, [torch.device("cpu")])
    said: list[str] = []
    train, held_out = own_text(recipe, target, tmp_path / "run", again=True, say=said.append)
    assert held_out is not None and len(held_out.read_text().splitlines()) == 2
    assert any("6 of 6" in line for line in said)
    train.write_text("changed")
    own_text(recipe, target, tmp_path / "run", again=False, say=said.append)
    assert train.read_text() == "changed"
    own_text(recipe, target, tmp_path / "run", again=True, say=said.append)
    assert train.read_text() != "changed"


def test_a_failing_device_ends_it_and_leaves_no_file(recipe, tmp_path, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("no memory left")

    monkeypatch.setattr("dflash.regenerate.continue_batch", broken)
    with pytest.raises(RuntimeError, match="no memory left"):
        write(recipe(), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_first_failing_device_ends_the_others(recipe, tmp_path, monkeypatch):
    """Also where the first device in the list is the one that goes on."""
    recipe, ended = recipe(), []
    first = load_targets(recipe.target, [torch.device("cpu")]).replicas[0]
    second = load_targets(recipe.target, [torch.device("cpu")]).replicas[0]

    def batch(model, prompts, *, go_on, **_):
        if model is second.model:
            raise RuntimeError("no memory left")
        deadline, tick = time.monotonic() + 30, threading.Event()
        while go_on() and time.monotonic() < deadline:
            tick.wait(0.01)
        ended.append(go_on())
        return [[1] for _ in prompts]

    monkeypatch.setattr("dflash.regenerate.continue_batch", batch)
    with pytest.raises(RuntimeError, match="no memory left"):
        regenerate(
            recipe.data, recipe.data.train, Targets([first, second]), tmp_path / "o",
            prompts=6, seed=0,
        )  # fmt: skip
    assert not any(ended), "the other device was not told to end"


def test_bad_lines_are_told_and_fatal_where_the_recipe_says_so(recipe, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "the quick brown fox"}\n{"text": 7}\n')
    target, said = load_targets(recipe().target, [torch.device("cpu")]), []
    data = recipe().data
    regenerate(data, [path], target, tmp_path / "o", prompts=1, seed=0, say=said.append)
    assert said == ["bad lines skipped: 1", f"  {path}:2: 'text' is not a string"]
    strict = data.model_copy(update={"on_bad_line": "fail"})
    with pytest.raises(DataError, match=f"{path}:2: 'text' is not a string; correct it or set"):
        regenerate(strict, [path], target, tmp_path / "p", prompts=1, seed=0)
    assert not (tmp_path / "p").exists()


def test_a_conversation_that_ends_with_a_question_is_answered(recipe, tmp_path):
    recipe = recipe()
    tokenizer = load_targets(recipe.target, [torch.device("cpu")]).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    ((prompt,), _) = choose_prompts(
        recipe.data, [path], tokenizer, recipe.data.regenerate, 1, seed=0
    )
    assert tokenizer.decode(prompt.ids) == "<user>hello;<assistant>"


def test_the_command_writes_a_file_and_refuses_in_one_line(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe().to_yaml())
    done = CliRunner().invoke(app, ["regenerate", str(path), "-o", str(tmp_path / "new" / "o")])
    assert done.exit_code == 0, done.output
    assert "new tokens" in done.output and (tmp_path / "new" / "o").is_file()
    plain = [str(path), "data.regenerate=null", "-o", "/proc/no/such"]
    refused = CliRunner().invoke(app, ["regenerate", *plain])
    assert refused.exit_code == 2
    assert refused.output.startswith("error: /proc/no/such: cannot be written")
