"""Whatever breaks is noticed at once, said in one line, and costs nothing before the checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from dflash.checkpoint import CheckpointStore
from dflash.schedule.supervise import RunFailed
from dflash.train import train


def break_learner(index, method, error, at=4):
    """The learner raises at its ``at``-th packet."""

    def built(pipeline):
        learner = pipeline.learners[index]
        plain, seen = getattr(learner, method), []

        def broken(packet):
            seen.append(packet.number)
            if len(seen) == at:
                raise error
            return plain(packet)

        setattr(learner, method, broken)

    return built


def break_target(pipeline):
    plain = pipeline.make_packet

    def broken(number, target):
        if number == 10:
            raise RuntimeError("features are gone")
        return plain(number, target)

    pipeline.make_packet = broken


def poison(pipeline):
    """A loss that is not a number, from packet 9 on (drafter 0, its fourth packet)."""
    plain = pipeline.make_packet

    def poisoned(number, target):
        packet = plain(number, target)
        if number >= 9:
            packet.features = torch.full_like(packet.features, float("nan"))
        return packet

    pipeline.make_packet = poisoned


FAULTS = [
    pytest.param(
        break_learner(1, "learn", RuntimeError("in backward"), at=4),
        r"drafter-1 died \(packet 10\): RuntimeError: in backward",
        id="drafter raises",
    ),
    pytest.param(
        break_learner(2, "learn", RuntimeError("in compile"), at=1),
        r"drafter-2 died \(packet 2\): RuntimeError: in compile",
        id="drafter raises at its first packet",
    ),
    pytest.param(
        break_target, r"target-0 died \(packet 10\): RuntimeError: features are gone", id="target"
    ),
    pytest.param(
        poison,
        r"drafter-\d died .*the loss is nan",
        id="loss is not a number",
        marks=pytest.mark.filterwarnings("error:Converting a tensor with requires_grad"),
    ),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_a_fault_ends_the_run_and_resume_goes_on(size, make_recipe_of, tmp_path, fault, said):
    recipe = make_recipe_of(
        size,
        run={"steps": 4, "checkpoint_every": 2, "evaluate_every": 4},
        # Others may be inside a compile, which a busy machine makes long.
        schedule={"join_seconds": 100},
    )
    with pytest.raises(RunFailed, match=said) as caught:
        train(recipe, tmp_path / "run", on_built=fault)
    assert caught.value.must_exit is False
    report = json.loads((tmp_path / "run" / "crash" / "report.json").read_text())
    assert report["recipe"]["run"]["steps"] == 4
    assert "thread drafter-0" in (tmp_path / "run" / "crash" / "stacks.txt").read_text()
    steps = CheckpointStore(tmp_path / "run" / "checkpoints").steps()
    if steps:  # what was saved is intact, and the run can go on from there
        assert train(recipe, tmp_path / "run", resume=True).step == 4


def command(folder, recipe, *words):
    path = folder / "recipe-in.yaml"
    path.write_text(recipe.to_yaml())
    return [sys.executable, "-m", "dflash", *words[:1], str(path), *words[1:]]


def test_a_signal_saves_and_exits_with_its_number(size, make_recipe_of, tmp_path):
    """SIGTERM from outside: the step is finished, saved, 143; resume ends the run."""
    recipe = make_recipe_of(size, run={"steps": 400, "checkpoint_every": 400})
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(tmp_path, recipe, "train", "-o", str(run)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    guard = threading.Timer(120, process.kill)
    guard.start()
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    output.append(process.stdout.read())
    guard.cancel()
    assert process.wait(60) == 143, "".join(output)
    (step,) = CheckpointStore(run / "checkpoints").steps()
    assert f"ended by signal 15 after step {step}; checkpoint saved" in "".join(output)


def test_a_worker_that_cannot_be_joined_does_not_keep_the_process(size, make_recipe_of, tmp_path):
    """One drafter raises while another is inside a compile that never ends: report, then exit 1."""
    script = tmp_path / "run.py"
    script.write_text(
        """
import sys, threading
import typer
from dflash import cli, train
from dflash.config import load_recipe

def built(pipeline):
    inside = threading.Event()
    def for_ever(packet):
        inside.set()
        threading.Event().wait()
    def raises(packet):
        inside.wait(60)
        raise RuntimeError("no more")
    pipeline.learners[0].learn = for_ever
    pipeline.learners[1].learn = raises

try:
    with cli._errors():
        train.train(load_recipe(sys.argv[1]), sys.argv[2], on_built=built)
except typer.Exit as error:
    sys.exit(50 + error.exit_code)
"""
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(make_recipe_of(size, schedule={"join_seconds": 0.5}).to_yaml())
    done = subprocess.run(
        [sys.executable, script, path, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "drafter-1 died (packet 1): RuntimeError: no more" in done.stderr
    assert (tmp_path / "run" / "crash" / "report.json").exists()


def test_missing_gpus_are_one_line(make_recipe_of, tmp_path, size):
    recipe = make_recipe_of(size, schedule={"targets": ["cuda:97"]})
    done = subprocess.run(
        command(tmp_path, recipe, "train", "-o", str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: schedule: this machine has no cuda:97")


@pytest.mark.skipif(os.environ.get("CUDA_VISIBLE_DEVICES") not in (None, ""), reason="has GPUs")
def test_too_few_gpus_fail_a_gate_that_requires_them():
    """``--require-gpus 8`` on a machine without them: one line, and not a green run of skips."""
    command = [sys.executable, "-m", "pytest", "tests/e2e", "-m", "gpu8", "--require-gpus", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "--require-gpus 8: torch sees 0 GPUs on this machine" in done.stderr
