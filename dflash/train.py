"""The training run: targets and drafters in threads, checkpoints between steps, one way to end.

Covers starting, resuming, interrupting and failing. The computation itself is in
:mod:`dflash.pipeline`; what holds the threads together is in :mod:`dflash.schedule`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dflash import disk
from dflash.checkpoint import CheckpointError, CheckpointStore
from dflash.compile import compile_guard
from dflash.compile.flex_on_cpu import flex_training_on_cpu
from dflash.config import Recipe, RecipeError
from dflash.data import RowSet, bad_line_report, build_rows
from dflash.learner import Sums
from dflash.model import DrafterConfig
from dflash.objective import paper_gamma
from dflash.pipeline import Pipeline, numbers
from dflash.progress import Progress, say
from dflash.regenerate import own_text
from dflash.schedule import Clock, Exchange, Place, Reducer, Stopper, Topology, Worker
from dflash.schedule.metrics import MetricsLog
from dflash.schedule.supervise import supervise
from dflash.target.load import load_targets

RECIPE_FILE = "recipe.yaml"


@dataclass
class RunResult:
    """How a run ended.

    Attributes:
        step: optimizer steps done, in all.
        signal: number of the signal that ended it early, or None.
        folder: the run's folder.
        held_out: numbers of the last evaluation.
        packets: worker -> packets that it handled.
    """

    step: int
    signal: int | None
    folder: Path
    held_out: dict[str, Any]
    packets: dict[str, int]


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    on_built: Callable[[Pipeline], None] = lambda _: None,
) -> RunResult:
    """Trains a drafter; everything that is kept goes below ``folder``.

    Args:
        resume: go on from the newest intact checkpoint in ``folder``.
        on_built: called with the pipeline before the workers start (tests look inside there).

    Raises:
        RecipeError, DataError, TargetError, CheckpointError: bad input, one line.
        RunFailed: a worker failed; the crash report is in ``folder``.
    """
    folder = Path(folder)
    store = CheckpointStore(folder / "checkpoints", keep=recipe.run.keep_checkpoints)
    topology = Topology.of(recipe.schedule)
    if missing := topology.missing():
        raise RecipeError(
            f"schedule: this machine has no {', '.join(missing)}; name other devices, "
            "for example schedule.targets=['cpu:0']"
        )
    _claim_folder(folder, recipe, resume, store)
    if all(place.device.type == "cpu" for place in (*topology.targets, *topology.drafters)):
        torch.set_num_threads(recipe.schedule.threads_per_worker)
    with contextlib.ExitStack() as stack:
        stack.enter_context(flex_training_on_cpu())
        guard = stack.enter_context(
            compile_guard(recipe.schedule.guard, recompile_limit=recipe.schedule.recompile_limit)
        )
        proof = guard.prove()
        shown = console or Console()
        text = folder if recipe.data.regenerate is not None else None
        pipeline, report = build(
            recipe,
            topology,
            guard,
            text_folder=text,
            fresh=not resume,
            say=lambda line: say(shown, line),
        )
        on_built(pipeline)
        run = _Run(pipeline, folder, store, guard.explanation)
        if resume:
            report = [*report, *run.load()]
            _write_recipe(folder, recipe)  # not before it is known that the run can go on with it
        metrics = stack.enter_context(MetricsLog(folder, tensorboard=recipe.run.tensorboard))
        progress = stack.enter_context(
            Progress(pipeline.steps, first=pipeline.step_number, console=shown)
        )
        for line in (*report, f"guard {guard.explanation}", f"guard {proof}"):
            progress.say(line)
        if recipe.schedule.guard == "serial":
            warm_up(pipeline)
        return run.go(metrics, progress)


def build(
    recipe: Recipe,
    topology: Topology,
    guard: Any,
    *,
    text_folder: Path | None = None,
    fresh: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Pipeline, list[str]]:
    """Loads the target and the data and builds the pipeline; also lines about the data.

    text_folder: let the target write the text first, there (``data.regenerate``); say: told how
    far that is. fresh: a new run, whose text is written also where an earlier start has written
    it, and whose weights are ``drafter.initial``'s; a resumed one has its own.
    """
    target = load_targets(recipe.target, [place.device for place in topology.targets])
    config = drafter_config(recipe, target)
    train_paths: Sequence[str | Path] = recipe.data.train
    held_out_paths: Sequence[str | Path] = recipe.data.held_out
    if text_folder is not None:
        own, own_held_out = own_text(recipe, target, text_folder, again=fresh, say=say)
        train_paths, held_out_paths = [own], [own_held_out] if own_held_out else []
    rows, read = build_rows(recipe.data, target.tokenizer, seed=recipe.run.seed, paths=train_paths)
    lines = read.lines()
    held_out: RowSet | None = None
    if held_out_paths:
        held_out, held_read = build_rows(
            recipe.data,
            target.tokenizer,
            seed=recipe.run.seed,
            paths=held_out_paths,
            shuffle=False,
        )
        bad = bad_line_report(held_read.bad_lines, held_read.first_bad)
        lines += [f"held out: {line}" for line in (held_read.lines()[0], *bad)]
    per_step = len(topology.drafters) * recipe.optimizer.accumulation
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(rows) / per_step)  # type: ignore[operator]
    pipeline = Pipeline(
        recipe, topology, target.replicas, target.ends, config, rows, held_out, guard, steps
    )
    if recipe.drafter.initial is not None and fresh:
        _start_from(pipeline, recipe.drafter.initial)
    return pipeline, lines


def drafter_config(recipe: Recipe, target: Any) -> DrafterConfig:
    """The drafter's shape: the recipe's where it says so, else the target's.

    Raises RecipeError where the two do not fit, or the objective not the shape.
    """
    settings = recipe.drafter
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    given = {name: getattr(settings, name) for name in names}
    mask_token_id = target.mask_token_id(settings.mask_token_id)
    if recipe.objective.weighting == "decay" and recipe.objective.gamma is None:
        try:
            paper_gamma(settings.block_size)
        except ValueError as error:
            raise RecipeError(f"objective.gamma: {error}") from error
    text = target.config.get_text_config()
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # after the head
    changed = [name for name in changes if getattr(text, name, None) not in (None, 1, 1.0)]
    if recipe.objective.teacher_share and changed:
        raise RecipeError(
            f"objective.teacher_share: this target has {changed[0]}, so its head alone is not its "
            "distribution: set it to 0"
        )
    try:
        return DrafterConfig.for_target(
            target.config,
            num_hidden_layers=settings.num_hidden_layers,
            block_size=settings.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=settings.target_layer_ids,
            num_features=settings.num_features,
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValueError as error:
        raise RecipeError(f"drafter: {str(error).removeprefix('drafter config: ')}") from error


def warm_up(pipeline: Pipeline) -> None:
    """Compiles every drafter's training and evaluation in turn (the guard ``serial``)."""
    tasks: dict[str, Callable[[], object]] = {}
    for index, learner in enumerate(pipeline.learners):
        packet = pipeline.make_packet(index, 0)
        tasks[f"{learner.place.worker} train"] = lambda le=learner, p=packet: le.learn(p)  # type: ignore[misc]
        if index == 0 and pipeline.held_out_packets():
            tasks["evaluate"] = lambda le=learner, p=packet: le.evaluate(p)  # type: ignore[misc]
    pipeline.learners[0].guard.warm_up(tasks)
    for learner in pipeline.learners:
        learner.drafter.zero_grad(set_to_none=True)


class _Run:
    """One run's moving parts; :meth:`go` returns when it has ended."""

    def __init__(
        self, pipeline: Pipeline, folder: Path, store: CheckpointStore, guard: str
    ) -> None:
        self.pipeline, self.folder, self.store, self.guard = pipeline, folder, store, guard
        self.recipe = pipeline.recipe
        self.held_out: dict[str, Any] = {}
        self.signal: int | None = None
        self.stopper = Stopper()
        self._saved_at = self._evaluated_at = -1
        self._step_begun = self._moved = time.monotonic()

    # -- state ---------------------------------------------------------------------------------

    def load(self) -> list[str]:
        """Goes on from the newest intact checkpoint; lines about what is not as it was."""
        notes: list[str] = []
        path = self.store.latest_good(notes.append)
        assert path is not None  # or it would not have come here
        tensors, state = self.store.load(path)
        if state.get("packets_per_step") != self.pipeline.packets_per_step:
            raise CheckpointError(
                f"{path}: was trained with {state.get('packets_per_step')} packets a step, this "
                f"recipe has {self.pipeline.packets_per_step}: keep drafters x accumulation equal"
            )
        if state.get("drafter") != self.pipeline.config.model_dump(mode="json"):
            raise CheckpointError(f"{path}: is of a drafter of another shape than this recipe's")
        if int(state["step"]) > self.pipeline.steps:
            raise CheckpointError(
                f"{path}: is beyond the {self.pipeline.steps} steps of this recipe: set run.steps "
                f"to at least {state['step']}"
            )
        is_weight = {name: name.startswith("drafter.") for name in tensors}
        weights = {n.removeprefix("drafter."): t for n, t in tensors.items() if is_weight[n]}
        for learner in self.pipeline.learners:
            learner.drafter.load_state_dict(weights)
        try:
            self.pipeline.optimizer.load({n: t for n, t in tensors.items() if not is_weight[n]})
        except ValueError as error:
            raise CheckpointError(
                f"{path}: is of another optimizer ({error}): keep optimizer.name"
            ) from error
        self.pipeline.step_number = int(state["step"])
        self.held_out = dict(state.get("held_out", {}))
        self._evaluated_at = int(state.get("held_out_step", -1))
        self._saved_at = self.pipeline.step_number
        now, then = len(self.pipeline.rows), state.get("rows")
        if now != then is not None:
            notes.append(
                f"note: the data made {then} rows when the run was saved and make {now} now: it "
                "goes on, but not as the unbroken run would have"
            )
        return notes

    def save(self) -> None:
        """Writes a checkpoint of the present step, once."""
        step = self.pipeline.step_number
        if self._saved_at == step:
            return
        master = self.pipeline.learners[0].drafter
        tensors = {
            f"drafter.{name}": value.detach().cpu().clone()
            for name, value in master.state_dict().items()
        }
        tensors |= self.pipeline.optimizer.tensors()
        state = {
            "step": step,
            "packets_per_step": self.pipeline.packets_per_step,
            "drafter": self.pipeline.config.model_dump(mode="json"),
            "rows": len(self.pipeline.rows),
            "held_out": self.held_out,
            "held_out_step": self._evaluated_at,
            "torch": str(torch.__version__),
        }
        self.store.save(step, tensors, state)
        if self._evaluated_at == step:  # numbers of other weights would say nothing of these
            self.store.mark_best(step, float(self.held_out["acceptance"]))
        self._saved_at = step

    # -- the run -------------------------------------------------------------------------------

    def go(self, metrics: MetricsLog, progress: Progress) -> RunResult:
        """Trains to the last step or to a signal."""
        pipeline, schedule = self.pipeline, self.recipe.schedule
        targets, drafters = len(pipeline.targets), len(pipeline.learners)
        exchange = Exchange(
            targets=targets,
            drafters=drafters,
            depth=schedule.queue_depth,
            first=pipeline.step_number * pipeline.packets_per_step,
            end=pipeline.steps * pipeline.packets_per_step,
            stopper=self.stopper,
        )

        def step(gradients: list[torch.Tensor], sums: list[Sums]) -> None:
            self._step(gradients, sums, exchange, metrics, progress)

        replicas = [learner.parameters for learner in pipeline.learners]
        reducer = Reducer(replicas, step, self.stopper)
        workers = [
            Worker(f"target-{index}", self._target(index, exchange), self.stopper)
            for index in range(targets)
        ] + [
            Worker(f"drafter-{index}", self._drafter(index, exchange, reducer), self.stopper)
            for index in range(drafters)
        ]
        begun = time.monotonic()

        def tick() -> None:
            elapsed = max(time.monotonic() - begun, 1e-9)
            progress.workers([_state(worker, elapsed) for worker in workers])

        self._step_begun = begun
        with _signals(self._on_signal):
            supervise(
                workers,
                self.stopper,
                stall_seconds=schedule.stall_seconds,
                join_seconds=schedule.join_seconds,
                folder=self.folder,
                facts=lambda: {
                    "step": pipeline.step_number,
                    "guard": self.guard,
                    "queue_depths": exchange.depths(),
                    "recipe": self.recipe.model_dump(mode="json"),
                },
                on_tick=tick,
                moved=lambda: self._moved,
            )
        if self.signal is None:
            self.save()
        for worker in workers:
            seconds = {name: round(s, 3) for name, s in worker.clock.snapshot().items()}
            metrics.write(
                "worker", pipeline.step_number, worker=worker.name,
                packets=worker.clock.packets, seconds=seconds,
            )  # fmt: skip
        metrics.write("end", pipeline.step_number, signal=self.signal)
        return RunResult(
            pipeline.step_number,
            self.signal,
            self.folder,
            self.held_out,
            {worker.name: worker.clock.packets for worker in workers},
        )

    def _target(self, index: int, exchange: Exchange) -> Callable[[Clock], None]:
        def body(clock: Clock) -> None:
            self._settle(self.pipeline.topology.targets[index])
            while True:
                with clock.activity_of("queue"):
                    number = exchange.claim(index)
                if number is None:
                    return
                clock.packet = number
                with clock.activity_of("compute"):
                    packet = self.pipeline.make_packet(number, index)
                exchange.deliver(packet)
                clock.packets += 1
                clock.packet = None

        return body

    def _drafter(self, index: int, exchange: Exchange, reducer: Reducer) -> Callable[[Clock], None]:
        learner = self.pipeline.learners[index]

        def body(clock: Clock) -> None:
            self._settle(learner.place)
            while True:
                total: Sums | None = None
                for _ in range(self.pipeline.accumulation):
                    with clock.activity_of("queue"):
                        packet = exchange.take(index)
                    if packet is None:
                        return
                    clock.packet = packet.number
                    # The first call of a mode compiles; later ones find their code.
                    doing = "compute" if "train" in learner.compiled else "compile"
                    with clock.activity_of(doing):
                        sums = learner.learn(packet)
                    clock.packets += 1
                    total = sums if total is None else total + sums
                assert total is not None
                with clock.activity_of("reduce"):
                    reducer.meet(index, total)
                clock.packet = None

        return body

    def _step(
        self,
        gradients: list[torch.Tensor],
        sums: list[Sums],
        exchange: Exchange,
        metrics: MetricsLog,
        progress: Progress,
    ) -> None:
        """Everything that happens between two steps, while all drafters wait."""
        pipeline, run = self.pipeline, self.recipe.run
        result = pipeline.step(gradients, sums)
        now = time.monotonic()
        seconds, self._step_begun = now - self._step_begun, now
        result |= {
            "seconds": round(seconds, 4),
            "tokens_per_second": result["tokens"] / max(seconds, 1e-9),
            "queue_depths": exchange.depths(),
        }
        step = pipeline.step_number
        last = step == pipeline.steps
        if step % run.log_every == 0 or last:
            metrics.write("train", step, **result)
        progress.step(step, result)
        if (step % run.evaluate_every == 0 or last) and pipeline.held_out_packets():
            evaluated = pipeline.evaluate(self._move)
            assert evaluated is not None
            self.held_out, self._evaluated_at = numbers(evaluated), step
            metrics.write("held_out", step, **self.held_out)
            progress.held_out(step, self.held_out)
            self._step_begun = time.monotonic()
        if step % run.checkpoint_every == 0 or last or self.signal is not None:
            self.save()
        if self.signal is not None:
            self.stopper.stop(f"signal {self.signal}", failure=False)

    def _move(self) -> None:
        self._moved = time.monotonic()

    def _on_signal(self, number: int) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self.signal = number

    def _settle(self, place: Place) -> None:
        """What belongs to the thread that sets it, at the begin of a worker's."""
        # The result of a sum depends on this number.
        torch.set_num_threads(self.recipe.schedule.threads_per_worker)
        if place.device.type == "cuda":
            # Else pinned memory and whatever asks for "the" device mean the first GPU.
            torch.cuda.set_device(place.device)


def _state(worker: Worker, elapsed: float) -> dict[str, Any]:
    seconds = worker.clock.snapshot()
    idle = sum(seconds.get(name, 0.0) for name in ("queue", "reduce", "start"))
    return {
        "worker": worker.name,
        "activity": worker.clock.activity,
        "packets": worker.clock.packets,
        "busy": max(0.0, min(1.0, (sum(seconds.values()) - idle) / elapsed)),
    }


@contextlib.contextmanager
def _signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after its step; only the main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda n, _frame: on_signal(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _claim_folder(folder: Path, recipe: Recipe, resume: bool, store: CheckpointStore) -> None:
    if resume and not folder.is_dir():
        raise RecipeError(f"{folder}: there is no such run to resume")
    if resume and store.latest() is None:  # known before a target is loaded and a text is written
        raise CheckpointError(
            f"{store.folder}: there is no checkpoint to resume from; start anew with 'dflash train'"
        )
    if not resume and store.latest() is not None:
        raise RecipeError(
            f"{folder}: holds a run already; use 'dflash resume {folder}' or another folder"
        )
    if not resume:
        _write_recipe(folder, recipe)


def _write_recipe(folder: Path, recipe: Recipe) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace_file(folder / RECIPE_FILE, recipe.at_home_anywhere().to_yaml().encode())
    except OSError as error:
        raise RecipeError(f"{folder}: cannot be written ({error.strerror})") from error


def _start_from(pipeline: Pipeline, path: str) -> None:
    from dflash.export import load_exported

    config, weights = load_exported(path)
    if config != pipeline.config:
        differing = [
            name
            for name, value in config.model_dump().items()
            if getattr(pipeline.config, name) != value
        ]
        raise RecipeError(f"drafter.initial: {path} differs in {', '.join(differing)}")
    for learner in pipeline.learners:
        learner.drafter.load_state_dict({k: v.float() for k, v in weights.items()})
