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
    assert "problem: 1 rows are fewer than the 3 packets of one step" in done.output


def test_doctor_proves_the_guard_and_refuses_an_unknown_one():
    done = CliRunner().invoke(app, ["doctor"])
    assert "guard proved" in done.output
    refused = CliRunner().invoke(app, ["doctor", "--guard", "none-such"])
    assert refused.exit_code == 2
    assert refused.output.startswith("error: unknown guard 'none-such': use one of ")
