"""``RUN/report.html``: what a run did, in one file that loads nothing.

Covers finished, resumed, interrupted and crashed runs, from what stands in the run's folder:
``metrics.jsonl``, ``recipe.yaml``, ``eval*.json``, ``crash/`` and ``export/``; what is missing is
left out. Every acceptance length includes the bonus token, and the page says so. A step that a
resumed run did again counts once, with its last numbers. Long runs are drawn as means of equally
many steps, with the range behind them.

Not covered: several runs side by side; TensorBoard has those.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.charts import Bars, Chart, Series
from dflash.schedule.metrics import read_metrics

ACTIVITIES = ("start", "queue", "copy", "compute", "compile", "reduce")
IDLE = ("start", "queue", "reduce")  # a worker that waits for others is not busy
PAGE = "report.html"
_TEMPLATES = Path(__file__).with_name("templates")
_FIRST = 3  # charts above the workers; the others stand below
_MOST_TEXT = 200_000  # characters of a crash's stacks


class ReportError(ValueError):
    """There is nothing to report on; one line says why."""


@dataclass(frozen=True)
class WorkerTime:
    """Where one worker's time went, over all parts of a resumed run.

    Attributes:
        shares: activity -> share of its time, in 0 to 1.
        busy: share spent in neither of :data:`IDLE`.
    """

    name: str
    packets: int
    seconds: float
    shares: dict[str, float]

    @property
    def busy(self) -> float:
        return sum(share for name, share in self.shares.items() if name not in IDLE)


@dataclass(frozen=True)
class Evaluation:
    """One ``eval*.json``; ``problem`` instead of numbers where it cannot be read."""

    file: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Run:
    """Everything that the page shows, read once."""

    folder: Path
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    workers: list[WorkerTime]
    end: dict[str, Any] | None
    recipe: str
    evaluations: list[Evaluation]
    crash: dict[str, Any]
    crash_at: float
    stacks: str
    export: list[tuple[str, int]]
    last_write: float

    @property
    def went_on(self) -> bool:
        """Whether the run was resumed after its crash and came to an end."""
        return bool(self.crash) and self.end is not None and self.end["time"] > self.crash_at

    @property
    def state(self) -> str:
        """How it ended, in a few words."""
        if self.crash and not self.went_on:
            return "crashed"
        if self.end is None:
            return "no end recorded: it runs, or was killed"
        signal = self.end.get("signal")
        return "complete" if signal is None else f"ended by signal {signal}"


def write_run_report(folder: str | Path) -> Path:
    """Writes the page into the run's folder and returns its path.

    Raises:
        ReportError: the folder holds no run, or cannot be written.
    """
    folder = Path(folder)
    text = render(read_run(folder))
    path = folder / PAGE
    partial = path.with_name(PAGE + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ReportError(f"{path}: cannot be written ({error.strerror})") from error
    return path


# -- reading -------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """Reads whatever the folder has.

    Raises:
        ReportError: it has neither metrics nor a recipe nor a crash report.
    """
    crash_file, metrics = folder / "crash" / "report.json", folder / "metrics.jsonl"
    recipe = folder / "recipe.yaml"
    if not any(path.is_file() for path in (crash_file, metrics, recipe)):
        raise ReportError(f"{folder}: is not a run (no metrics.jsonl, recipe.yaml or crash report)")
    lines = read_metrics(folder) if metrics.is_file() else []
    lines = [line for line in lines if isinstance(line, dict) and "kind" in line]
    ends = [line for line in lines if line["kind"] == "end"]
    # The last line of a run that was resumed and is going on is not an end.
    end = ends[-1] if ends and lines[-1]["kind"] == "end" else None
    return Run(
        folder=folder,
        train=_by_step(line for line in lines if line["kind"] == "train"),
        held_out=_by_step(line for line in lines if line["kind"] == "held_out"),
        workers=_worker_times(line for line in lines if line["kind"] == "worker"),
        end=end,
        recipe=_text(recipe),
        evaluations=[_evaluation(path) for path in sorted(folder.glob("eval*.json"))],
        crash=_crash(crash_file),
        crash_at=crash_file.stat().st_mtime if crash_file.is_file() else 0.0,
        stacks=_text(folder / "crash" / "stacks.txt")[:_MOST_TEXT],
        export=[
            (path.name, path.stat().st_size)
            for path in sorted((folder / "export").glob("*"))
            if path.is_file()
        ],
        last_write=max((line.get("time", 0.0) for line in lines), default=0.0),
    )


def _by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per step, the last that was written, in the order of the steps."""
    last = {line["step"]: line for line in lines}
    return [last[step] for step in sorted(last)]


def _worker_times(lines: Iterable[Mapping[str, Any]]) -> list[WorkerTime]:
    packets: dict[str, int] = {}
    spent: dict[str, dict[str, float]] = {}
    for line in lines:
        name = line["worker"]
        packets[name] = packets.get(name, 0) + line["packets"]
        mine = spent.setdefault(name, {})
        for activity, seconds in line["seconds"].items():
            mine[activity] = mine.get(activity, 0.0) + seconds
    times = []
    for name, mine in spent.items():
        total = sum(mine.values())
        shares = {activity: s / total if total else 0.0 for activity, s in mine.items()}
        times.append(WorkerTime(name, packets[name], total, shares))
    return times


def _evaluation(path: Path) -> Evaluation:
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(numbers, dict) or "tau" not in numbers:
            return Evaluation(path.name, problem="is not the report of an evaluation")
    except (OSError, ValueError) as error:
        return Evaluation(path.name, problem=f"cannot be read ({error})")
    return Evaluation(path.name, numbers)


def _crash(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"reason": f"its report cannot be read ({error})"}
    return report if isinstance(report, dict) else {"reason": "its report is not one"}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- the page ------------------------------------------------------------------------------------


def render(run: Run) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": _size, "number": _number, "zip": zip}
    environment.globals["css"] = lambda name: f"a-{name if name in ACTIVITIES else 'other'}"
    seen = {name: None for worker in run.workers for name in worker.shares}
    charts = _charts(run)
    return environment.get_template("run.html").render(
        run=run,
        facts=_facts(run),
        charts=[chart for chart in charts[:_FIRST] if chart.series],
        more_charts=[chart for chart in charts[_FIRST:] if chart.series],
        slots=_slot_bars(run),
        evaluations=[evaluation for evaluation in run.evaluations if not evaluation.problem],
        unreadable=[evaluation for evaluation in run.evaluations if evaluation.problem],
        eval_bars=[bars for bars in _eval_bars(run) if bars.series],
        activities=[
            *(name for name in ACTIVITIES if name in seen),
            *(name for name in seen if name not in ACTIVITIES),
        ],
        per_point=max(chart.per_point for chart in charts),
        last_write=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(run.last_write))
        if run.last_write
        else "",
        not_finite=sum(chart.not_finite for chart in charts),
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if run.train:
        last = run.train[-1]
        tokens = sum(line.get("tokens", 0) for line in run.train)
        seconds = sum(line.get("seconds", 0.0) for line in run.train)
        facts += [
            ("step", str(last["step"])),
            ("training loss", _number(last.get("loss"))),
            ("training acceptance", _number(last.get("acceptance"))),
        ]
        if seconds > 0:
            facts.append(("tokens per second", _number(tokens / seconds)))
            facts.append(("time in steps", _duration(seconds)))
    if run.held_out:
        best = max(run.held_out, key=lambda line: _finite(line.get("acceptance")) or -math.inf)
        facts += [
            ("held-out loss", _number(run.held_out[-1].get("loss"))),
            ("held-out acceptance", _number(run.held_out[-1].get("acceptance"))),
            ("best", f"{_number(best.get('acceptance'))} at step {best['step']}"),
        ]
    return facts


def _charts(run: Run) -> list[Chart]:
    def of(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float | None]]:
        return [(line["step"], line.get(key)) for line in lines]

    def both(key: str) -> list[Series]:
        return [
            Series("training", of(run.train, key), 1),
            Series("held-out", of(run.held_out, key), 2, dots=True),
        ]

    queues = max((len(line.get("queue_depths", ())) for line in run.train), default=0)
    depths = []
    for index in range(queues):
        points = [(line["step"], _at(line, "queue_depths", index)) for line in run.train]
        depths.append(Series(f"drafter-{index}", points, index + 1))
    return [
        Chart.of("Loss", "nats per supervised slot, weighted; log scale", both("loss"), log=True),
        Chart.of(
            "Acceptance length",
            "tokens committed per block, bonus included; simulated",
            both("acceptance"),
        ),
        Chart.of(
            "Throughput",
            "trained tokens per second, of each step",
            [Series("tokens per second", of(run.train, "tokens_per_second"), 3)],
            zero=True,
        ),
        Chart.of("Queue depths", "packets that wait for each drafter", depths, zero=True),
        Chart.of(
            "Gradient norm",
            "before clipping; log scale",
            [Series("gradient norm", of(run.train, "gradient_norm"), 4)],
            log=True,
        ),
        Chart.of(
            "Learning rate",
            "of each step",
            [Series("learning rate", of(run.train, "learning_rate"), 5)],
            zero=True,
        ),
    ]


def _at(line: Mapping[str, Any], key: str, index: int) -> float | None:
    values = line.get(key, ())
    return values[index] if index < len(values) else None


def _slot_bars(run: Run) -> Bars | None:
    """Accuracy of each slot: the last evaluation, and the mean of the last tenth of the steps."""
    series = []
    if run.train:
        tail = run.train[-max(1, len(run.train) // 10) :]
        columns = zip(*(line.get("slot_accuracy", ()) for line in tail), strict=False)
        means = [sum(column) / len(column) for column in columns]
        series.append((f"training, mean of the last {len(tail)} logged steps", means, 1))
    if run.held_out:
        last = run.held_out[-1]
        series.append((f"held-out, step {last['step']}", last.get("slot_accuracy", []), 2))
    series = [one for one in series if one[1]]
    if not series:
        return None
    return Bars.of(
        "Accuracy by slot", "share of slots whose most likely token is the label", series,
        first=1, top=1.0, percent=True,
    )  # fmt: skip


def _eval_bars(run: Run) -> list[Bars]:
    def series(take: Callable[[Mapping[str, Any]], Any]) -> list[tuple[str, list[Any], int]]:
        found = []
        for index, evaluation in enumerate(e for e in run.evaluations if not e.problem):
            if values := take(evaluation.numbers):
                found.append((evaluation.file, values, index + 1))
        return found

    def committed(numbers: Mapping[str, Any]) -> list[float]:
        counts = numbers.get("sums", {}).get("speculative", {}).get("committed", [])
        total = sum(counts)
        return [count / total for count in counts] if total else []

    return [
        Bars.of(
            "Tokens committed per pass", "share of verify passes; bonus included",
            series(committed), first=1, percent=True,
        ),
        Bars.of(
            "Accepted up to slot", "share of the passes that proposed it",
            series(lambda numbers: numbers.get("slot_rates")), first=1, top=1.0, percent=True,
        ),
    ]  # fmt: skip


def _finite(value: Any) -> float | None:
    good = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if good else None


def _number(value: Any) -> str:
    """A count as it is, else four significant digits; a dash for what is not a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    number = _finite(value)
    if number is None:
        return "-" if value is None else str(value)
    if number != 0 and not 1e-3 <= abs(number) < 1e5:
        return f"{number:.3g}"
    return f"{number:.{max(0, 3 - math.floor(math.log10(abs(number) or 1)))}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
