"""The whole schedule: five target threads, three drafters, one result whatever the timing."""

from __future__ import annotations

import io
import random
import signal
import threading
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from dflash.checkpoint import CheckpointError, CheckpointStore
from dflash.compile import compile_guard
from dflash.compile.flex_on_cpu import flex_training_on_cpu
from dflash.config import load_recipe
from dflash.finish import export_run
from dflash.pipeline import run_serially
from dflash.schedule import Topology
from dflash.schedule.metrics import read_metrics
from dflash.train import build, train


def weights_of(folder):
    store = CheckpointStore(folder / "checkpoints")
    tensors, _ = store.load(store.latest())
    return tensors


def assert_same(got, want, exact):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if exact:
            assert torch.equal(got[name], tensor), name
        else:
            torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-4)


def train_serially(recipe):
    """The reference: the same steps in one thread."""
    torch.set_num_threads(recipe.schedule.threads_per_worker)
    with flex_training_on_cpu(), compile_guard("auto") as guard:
        pipeline, _ = build(recipe, Topology.of(recipe.schedule), guard)
        run_serially(pipeline, steps=pipeline.steps)
        master = pipeline.learners[0].drafter
        tensors = {f"drafter.{k}": v.detach().cpu().clone() for k, v in master.state_dict().items()}
        return tensors | pipeline.optimizer.tensors()


@pytest.fixture
def quiet():
    """No thread of a run may outlive it."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.is_alive()]
    workers = [name for name in left if name.startswith(("target-", "drafter-"))]
    assert not workers, f"left behind: {workers}"


@pytest.mark.usefixtures("quiet")
def test_threads_equal_a_serial_run(size, make_recipe_of, tmp_path):
    """5 + 3 threads and one thread give the same weights and state; every worker works."""
    recipe = make_recipe_of(size)
    result = train(recipe, tmp_path / "run")
    assert_same(weights_of(tmp_path / "run"), train_serially(recipe), size.exact)
    packets = result.packets
    assert [packets[f"drafter-{i}"] for i in range(3)] == [6, 6, 6]
    assert sum(packets[f"target-{i}"] for i in range(5)) == 18
    assert all(packets[f"target-{i}"] > 0 for i in range(5)), "a target did nothing"


@pytest.mark.usefixtures("quiet")
def test_timing_does_not_change_the_result(size, make_recipe_of, tmp_path):
    """Target workers held back in shuffled order: the same weights, bit for bit on the CPU."""
    recipe = make_recipe_of(size, schedule={"queue_depth": 3})
    train(recipe, tmp_path / "plain")

    def hold_back(pipeline):
        plain, turn = pipeline.make_packet, threading.Condition()
        # Groups of five neighbouring packets, one per target, are made in shuffled order.
        order, made = [], []
        for group in range(0, 18, 5):
            numbers = list(range(group, min(group + 5, 18)))
            random.Random(group).shuffle(numbers)
            order.append(numbers)

        def make_packet(number, target):
            mine = order[number // 5]
            with turn:
                before = mine[: mine.index(number)]
                # Back-pressure may keep a packet of the group from being asked for: no dead wait.
                turn.wait_for(lambda: all(n in made for n in before), timeout=0.2)
            packet = plain(number, target)
            with turn:
                made.append(number)
                turn.notify_all()
            return packet

        pipeline.make_packet = make_packet

    train(recipe, tmp_path / "shuffled", on_built=hold_back)
    assert_same(weights_of(tmp_path / "shuffled"), weights_of(tmp_path / "plain"), size.exact)


@pytest.mark.usefixtures("quiet")
def test_n_plus_m_steps_equal_n_save_resume_m(size, make_recipe_of, tmp_path):
    """Data position, anchors, optimizer state and schedule go on where they were."""
    recipe = make_recipe_of(size)
    train(recipe, tmp_path / "whole")

    def stop_after_three(pipeline):
        plain = pipeline.step

        def step(gradients, sums):
            numbers = plain(gradients, sums)
            if pipeline.step_number == 3:
                # What the interpreter would call, but in this thread, so at this very step.
                signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
            return numbers

        pipeline.step = step

    first = train(recipe, tmp_path / "parts", on_built=stop_after_three)
    assert (first.signal, first.step) == (15, 3)
    second = train(recipe, tmp_path / "parts", resume=True)
    assert (second.signal, second.step) == (None, 6)
    assert_same(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"), size.exact)


@pytest.mark.usefixtures("quiet")
def test_a_refused_resume_leaves_the_run_as_it_was(size, make_recipe_of, tmp_path):
    """A recipe that the checkpoint does not fit is refused, and the run's own recipe stays."""
    few = {"targets": [size.targets[0]], "drafters": [size.drafters[0]]}
    recipe = make_recipe_of(size, schedule=few, run={"steps": 2})
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint to resume from; start anew"):
        train(recipe, run, resume=True)
    train(recipe, run)
    before = (run / "recipe.yaml").read_bytes()
    for name, changed in {
        "keep drafters x accumulation equal": {"optimizer": {"accumulation": 2}},
        "keep optimizer.name": {"optimizer": {"name": "muon"}},
        "a drafter of another shape": {"drafter": {"num_hidden_layers": 1}},
        "beyond the 1 steps": {"run": {"steps": 1}},
    }.items():
        other = make_recipe_of(size, schedule=few, **{"run": {"steps": 3}, **changed})
        with pytest.raises(CheckpointError, match=name):
            train(other, run, resume=True)
        assert (run / "recipe.yaml").read_bytes() == before
    out = io.StringIO()
    longer = make_recipe_of(
        size, schedule=few, run={"steps": 3}, data={"row_length": 256}
    )  # fewer rows: another data position
    assert train(longer, run, resume=True, console=Console(file=out)).step == 3
    assert "note: the data made" in out.getvalue()
    assert load_recipe(run / "recipe.yaml") == longer


@pytest.mark.usefixtures("quiet")
def test_the_best_checkpoint_is_one_that_was_measured(size, make_recipe_of, tmp_path):
    """Evaluated at 2 and 4, saved at 3 and 4: 3 has nobody's numbers, though 2 was better."""
    few = {"targets": [size.targets[0]], "drafters": [size.drafters[0]]}
    recipe = make_recipe_of(
        size, schedule=few, run={"steps": 4, "evaluate_every": 2, "checkpoint_every": 3}
    )

    def worse_later(pipeline):
        plain = pipeline.evaluate

        def evaluate(on_row):
            sums = plain(on_row)
            if pipeline.step_number == 4:
                sums.metrics = replace(sums.metrics, committed=sums.metrics.blocks)
            return sums

        pipeline.evaluate = evaluate

    train(recipe, tmp_path / "run", on_built=worse_later)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == [3, 4]
    assert store.best() == store.path(4)
    assert store.load(store.path(3))[1]["held_out_step"] == 2

    (store.path(4) / "tensors.safetensors").write_bytes(b"gone")
    said = []
    exported = export_run(tmp_path / "run", say=said.append)
    assert any("step-000004: damaged" in line and "was the best" in line for line in said)
    card = (exported / "README.md").read_text()
    assert "| optimizer steps | 3 |" in card and "of step 2" in card, "another step's weights"


@pytest.mark.usefixtures("quiet")
def test_loss_falls_and_the_drafter_serves(size, make_recipe_of, tmp_path):
    """From text to an exported drafter that decodes, token for token what the target would say."""
    from dflash.report import draw_curves, evaluate_run

    recipe = make_recipe_of(size, run={"steps": 20, "evaluate_every": 10, "checkpoint_every": 10})
    train(recipe, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in lines if line["kind"] == "held_out"] == [10, 20]
    workers = {line["worker"]: line for line in lines if line["kind"] == "worker"}
    assert workers["drafter-1"]["seconds"]["compile"] > 0
    assert all("copy" in worker["seconds"] for worker in workers.values())
    assert export_run(tmp_path / "run").name == "export"
    assert draw_curves(tmp_path / "run").stat().st_size > 0
    prompts = tmp_path / "prompt.txt"
    prompts.write_text("import json\n\ndef main(argument):\n    return json.loads(argument)\n" * 9)
    report = evaluate_run(
        tmp_path / "run", prompts, temperature=0.0, rule="match", max_new_tokens=24
    )
    assert report.identical == 3
    assert report.speculative.tau >= 1.0


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("guard", ["thread-local", "serial", "lock"])
def test_every_guard_trains_to_the_same_weights(size, make_recipe_of, tmp_path, guard):
    recipe = make_recipe_of(
        size, schedule={"guard": guard}, run={"steps": 2, "checkpoint_every": 2}
    )
    train(recipe, tmp_path / "run")
    assert_same(weights_of(tmp_path / "run"), train_serially(recipe), size.exact)


def test_accumulation_uses_the_same_packets_as_more_drafters(size, make_recipe_of, tmp_path):
    """Sums travel: 3 drafters x 1 packet and 1 drafter x 3 packets are the same step."""
    wide = make_recipe_of(size, run={"steps": 3, "checkpoint_every": 3})
    narrow = make_recipe_of(
        size,
        schedule={"drafters": [size.drafters[0]]},
        optimizer={"accumulation": 3},
        run={"steps": 3, "checkpoint_every": 3},
    )
    train(wide, tmp_path / "wide")
    train(narrow, tmp_path / "narrow")
    # Another order of summation: equal to rounding, not bit for bit.
    assert_same(weights_of(tmp_path / "narrow"), weights_of(tmp_path / "wide"), exact=False)
