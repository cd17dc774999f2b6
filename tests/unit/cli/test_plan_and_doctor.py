"""`dflash plan` looks at everything and trains nothing; `dflash doctor` proves the guard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dflash.cli import app

RECIPE = str(Path(__file__).parents[3] / "recipes" / "tiny-cpu.yaml")


@pytest.fixture
def run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def main(argument):\n    return argument\n" * 40)

    def run(*overrides):
        common = [f"data.train=['{text}']", f"data.held_out=['{text}']"]
        return CliRunner().invoke(app, ["plan", RECIPE, *common, *overrides])

    return run


def test_a_plan_says_shapes_memory_compiles_and_steps(run):
    done = run("data.regenerate=null")
    assert done.exit_code == 0, done.output
    for said in (
        "target-4", "drafter-2", "shapes: row 192, 32 anchors, 256 block slots",
        "1000 steps of 3 packets", "flex_attention once for each of 3 drafters",
        "memory on cpu: at least", "rows of 192 tokens",
    ):  # fmt: skip
        assert said in done.output, said


def test_a_plan_counts_the_text_that_the_target_will_write(run):
    done = run("data.regenerate.prompts=10", "run.steps=null", "run.epochs=3")
    assert done.exit_code == 0, done.output
    assert "10 prompts; from each the target first writes up to 128 tokens" in done.output
    assert "10 steps of 3 packets" in done.output  # 10 rows, 3 epochs


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that is missing")
def test_what_would_stop_the_run_is_a_problem_and_exit_code_1(run):
    done = run("data.regenerate.prompts=1", "schedule.targets=['cuda:0']")
    assert done.exit_code == 1
    assert "problem: this machine has no cuda:0" in done.output
    assert "note: 1 rows are fewer than the 3 packets of one step" in done.output  # would not


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter.num_features=50", "error: drafter: num_features=50 is too many"),
        ("drafter.head_dim=3", "error: drafter: head_dim=3 must be even"),
        ("data.held_out=['no-such-file']", "error: no-such-file: no such file or folder"),
        ("drafter.initial=no-such-folder", "error: no-such-folder/config.json: is missing"),
    ],
)
def test_what_a_run_would_refuse_is_refused_in_one_line(run, override, said):
    done = run("data.regenerate=null", override)
    assert done.exit_code == 2, done.output
    assert done.output.startswith(said) and done.output.count("\n") == 1


def test_a_block_size_without_a_gamma_is_refused_before_the_first_step(run):
    override = ("data.regenerate=null", "drafter.block_size=12", "objective.weighting=decay")
    done = run(*override)
    assert done.exit_code == 2
    assert done.output.startswith(
        "error: objective.gamma: the paper has no gamma for block_size=12"
    )
    assert run(*override, "objective.gamma=4").exit_code == 0


def test_a_plan_says_what_is_held_out(run, tmp_path):
    assert "held out: " in run("data.regenerate=null").output
    assert "3 prompts" in run("data.regenerate.held_out_prompts=3").output
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "def main(argument): return argument"}\n{"text": 7}\n')
    for how in ("data.regenerate=null", "data.regenerate.held_out_prompts=3"):
        assert f"{bad}:2: 'text' is not a string" in run(how, f"data.held_out=['{bad}']").output
    without = run("data.regenerate=null", "data.held_out=[]")
    assert "held out: nothing, so no checkpoint is the best" in without.output


def test_places_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    commands = [
        (["make-tiny-target", str(tmp_path / "file"), "--steps", "1"], "is not a folder"),
        (["eval", str(tmp_path / "run"), "--json", str(tmp_path / "no" / "x")], "name a file in"),
        (["regenerate", RECIPE, "-o", str(tmp_path / "run")], "is a folder; name a file"),
    ]
    for command, said in commands:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2, (command, done.output)
        assert done.output.startswith("error: ") and said in done.output
        assert done.output.count("\n") == 1


def test_a_run_without_an_export_says_how_to_make_one(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run: {steps: 1}\ndata: {train: [a]}\n")
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "def"])
    assert done.exit_code == 2
    assert f"has no export; make one with 'dflash export {tmp_path}'" in done.output


def test_doctor_proves_the_guard_and_refuses_an_unknown_one():
    done = CliRunner().invoke(app, ["doctor"])
    assert "guard proved" in done.output
    refused = CliRunner().invoke(app, ["doctor", "--guard", "none-such"])
    assert refused.exit_code == 2
    assert refused.output.startswith("error: unknown guard 'none-such': use one of ")
