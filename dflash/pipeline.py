"""Everything that a run needs, built once; the steps of training as plain functions of it.

Threads are not here: :mod:`dflash.train` puts these functions into workers, and
:func:`run_serially` calls them one after the other, which is the reference that a threaded run
has to equal bit for bit on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.compile import CompileGuard
from dflash.config import Recipe
from dflash.data import RowSet
from dflash.learner import Learner, Sums
from dflash.model import DrafterConfig
from dflash.objective import sample_anchors
from dflash.optimization import Optimizer
from dflash.schedule.exchange import Packet
from dflash.schedule.topology import Topology
from dflash.schedule.worker import timed
from dflash.transfer import send


class Pipeline:
    """Targets, rows, learners and the optimizer of one run.

    Args:
        targets: one per target worker (they may share weights), with ``features()``.
        ends: the target's embedding and head, to be copied to each drafter's device.
        rows, held_out: training and held-out rows; ``held_out`` may be None.
    """

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        targets: Sequence[Any],
        ends: tuple[nn.Module, nn.Module],
        config: DrafterConfig,
        rows: RowSet,
        held_out: RowSet | None,
        guard: CompileGuard,
        steps: int,
    ) -> None:
        self.recipe, self.topology, self.targets = recipe, topology, targets
        self.config, self.rows, self.held_out, self.steps = config, rows, held_out, steps
        self.accumulation = recipe.optimizer.accumulation
        self.packets_per_step = len(topology.drafters) * self.accumulation
        copies: dict[torch.device, tuple[nn.Module, nn.Module]] = {}
        self.learners = []
        for place in topology.drafters:
            if place.device not in copies:
                copies[place.device] = _frozen_copy(ends, place.device)
            self.learners.append(Learner(place, recipe, config, *copies[place.device], guard))
        master = self.learners[0].drafter
        self.optimizer = Optimizer(recipe.optimizer, dict(master.named_parameters()), steps)
        self.step_number = 0

    def make_packet(self, number: int, target: int) -> Packet:
        """Packet ``number`` of the training rows, made by target worker ``target``."""
        epoch, row = self.rows.packet(number)
        drafter = number % len(self.learners)
        return self._packet(number, epoch, row, target, self.learners[drafter].device)

    def held_out_packets(self) -> int:
        """Rows that one evaluation looks at."""
        if self.held_out is None:
            return 0
        return min(self.recipe.run.evaluate_rows, len(self.held_out))

    def evaluate(self, on_row: Callable[[], None] = lambda: None) -> Sums | None:
        """The master drafter on the held-out rows: always the same rows and anchors.

        on_row: called after each row; many rows may take longer than a step.
        """
        total: Sums | None = None
        for number in range(self.held_out_packets()):
            assert self.held_out is not None
            _, row = self.held_out.packet(number)
            packet = self._packet(number, 0, row, 0, self.learners[0].device)
            sums = self.learners[0].evaluate(packet)
            total = sums if total is None else total + sums
            on_row()
        return total

    def step(self, gradients: list[Tensor], contributions: Sequence[Sums]) -> dict[str, Any]:
        """One optimizer step on the master from the summed gradients; returns its numbers."""
        total = contributions[0]
        for sums in contributions[1:]:
            total = total + sums
        stepped = self.optimizer.step(self.step_number, gradients, float(total.loss.denominator))
        self.step_number += 1
        return {**numbers(total), **stepped}

    def _packet(
        self, number: int, epoch: int, row: Any, target: int, device: torch.device
    ) -> Packet:
        anchors = sample_anchors(
            row.loss_mask,
            row.document_ids,
            self.recipe.data.anchors_per_row,
            seed=self.recipe.run.seed,
            epoch=epoch,
            sample=row.index,
        )
        inputs = (row.input_ids[None], row.position_ids[None], self.config.target_layer_ids)
        if not self.recipe.objective.teacher_share:
            found = self.targets[target].features(*inputs)
            with timed("copy"):
                features, ready = send(found, device)
            return Packet(number, epoch, row, anchors, features, ready)
        found, final = self.targets[target].features_and_final(*inputs)
        with timed("copy"):
            features, ready = send(found, device)
            teacher, teacher_ready = send(final, device)
        return Packet(number, epoch, row, anchors, features, ready, teacher, teacher_ready)


def numbers(total: Sums) -> dict[str, Any]:
    """Means, made at the end from pooled sums; acceptance counts the bonus token."""
    correct, of = total.metrics.correct.tolist(), total.metrics.total.tolist()
    return {
        "loss": float(total.loss.numerator) / max(float(total.loss.denominator), 1e-12),
        "cross_entropy": float(total.loss.unweighted_numerator) / max(int(total.loss.count), 1),
        "acceptance": int(total.metrics.committed) / max(int(total.metrics.blocks), 1),
        "slot_accuracy": [c / max(n, 1) for c, n in zip(correct, of, strict=True)][1:],
        "supervised_slots": int(total.loss.count),
        "anchors": total.anchors,
        "anchor_coverage": total.anchors / max(total.slots, 1),
        "tokens": total.tokens,
    }


def run_serially(
    pipeline: Pipeline, *, steps: int, on_step: Callable[[dict[str, Any]], None] = lambda _: None
) -> None:
    """The same training in one thread, drafter after drafter; for tests and for debugging."""
    from dflash.schedule.reduction import reduce_into_master, spread_master

    replicas = [learner.parameters for learner in pipeline.learners]
    drafters = len(pipeline.learners)
    for step in range(pipeline.step_number, steps):
        contributions: list[Sums] = []
        for index, learner in enumerate(pipeline.learners):
            total: Sums | None = None
            for part in range(pipeline.accumulation):
                number = step * pipeline.packets_per_step + part * drafters + index
                packet = pipeline.make_packet(number, number % len(pipeline.targets))
                sums = learner.learn(packet)
                total = sums if total is None else total + sums
            assert total is not None
            contributions.append(total)
        on_step(pipeline.step(reduce_into_master(replicas), contributions))
        spread_master(replicas)


def _frozen_copy(
    ends: tuple[nn.Module, nn.Module], device: torch.device
) -> tuple[nn.Module, nn.Module]:
    """Embedding and head on ``device``: the originals where they are there already."""
    moved = []
    for module in ends:
        here = next(module.parameters()).device
        moved.append(module if here == device else copy.deepcopy(module).to(device))
    return moved[0], moved[1]
