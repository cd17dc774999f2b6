"""Run folders as the trainer leaves them, made without training."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

HOSTILE = "<script>alert('x')</script>\"&"
BEGUN = 1_700_000_000.0


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "train",
        "step": step,
        "time": BEGUN + step,
        "loss": 50 / step + 1,
        "cross_entropy": 50 / step + 1,
        "acceptance": 1 + step / 100,
        "slot_accuracy": [0.5, 0.25, 0.125],
        "tokens": 700,
        "learning_rate": 0.001,
        "gradient_norm": 2.0,
        "seconds": 0.5,
        "tokens_per_second": 1400.0,
        "queue_depths": [2, 1],
    }
    return line | changes


def held_out_line(step: int, **changes: Any) -> dict[str, Any]:
    line = train_line(step) | {"kind": "held_out", "acceptance": 1 + step / 200}
    return line | changes


def end_lines(step: int, signal: int | None = None) -> list[dict[str, Any]]:
    at = {"step": step, "time": BEGUN + step + 0.5}
    seconds = {
        "target-0": {"start": 1.0, "queue": 8.0, "copy": 0.5, "compute": 0.5},
        "drafter-0": {"queue": 1.0, "compile": 2.0, "compute": 5.0, "reduce": 2.0},
    }
    workers = [
        {"kind": "worker", "worker": name, "packets": step, "seconds": spent} | at
        for name, spent in seconds.items()
    ]
    return [*workers, {"kind": "end", "signal": signal} | at]


def evaluation(tau: float = 3.25) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "rule": "match",
        "max_new_tokens": 64,
        "block_size": 4,
        "bonus_included": True,
        "tau": tau,
        "slot_rates": [0.75, 0.5, None],
        "simulated_at_boundaries": tau,
        "simulated_at_every_position": 3.5,
        "speedup": None,
        "identical": 3,
        "sums": {"speculative": {"prompts": 3, "committed": [1, 2, 1, 0]}},
    }


def write_metrics(folder: Path, lines: list[dict[str, Any]], torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + torn)


def write_crash(folder: Path, at: float, reason: str = "drafter-1 died: RuntimeError: x") -> None:
    crash = folder / "crash"
    crash.mkdir(parents=True)
    worker = {
        "worker": "drafter-1",
        "alive": False,
        "activity": "queue",
        "since_seconds": 0.1,
        "packet": 7,
        "packets_done": 6,
        "traceback": f"Traceback ...\nRuntimeError: {HOSTILE}",
    }
    report = {"reason": reason, "torch": "2.13.0", "step": 2, "workers": [worker]}
    (crash / "report.json").write_text(json.dumps(report))
    (crash / "stacks.txt").write_text("target-0:\n  in claim")
    os.utime(crash / "report.json", (at, at))


def whole_run(folder: Path, steps: int = 600) -> Path:
    """Finished, evaluated, exported; long enough that its lines are thinned."""
    lines = [train_line(step) for step in range(1, steps + 1)]
    lines[20]["gradient_norm"] = math.nan
    held_out = [held_out_line(step) for step in range(100, steps + 1, 100)]
    write_metrics(folder, [*lines, *held_out, *end_lines(steps)])
    (folder / "recipe.yaml").write_text(f"name: {HOSTILE}\n")
    (folder / "eval.json").write_text(json.dumps(evaluation()))
    (folder / "eval-t1.json").write_text(json.dumps(evaluation(2.5)))
    (folder / "eval-torn.json").write_text("{")
    (folder / "export").mkdir()
    (folder / "export" / "model.safetensors").write_bytes(b"x" * 2048)
    return folder


def crashed_run(folder: Path) -> Path:
    """Died in its third step."""
    write_metrics(folder, [train_line(1), train_line(2)], torn='{"kind": "train", "st')
    write_crash(folder, BEGUN + 3)
    return folder
