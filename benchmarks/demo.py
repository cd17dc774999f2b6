"""The demo: the tiny recipe from nothing, then what the drafter does for held-out prompts.

    python benchmarks/demo.py [--output runs/demo] [--recipe recipes/tiny-cpu.yaml]

Trains with five target threads and three drafter threads, evaluates at temperature 0 and 1 side by
side on the beginning, middle and end of every held-out file, writes the report, and checks what
the demo promises. Exit code 1 where it falls short.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 64
EVALUATIONS = {"eval-t0": ("0", "match"), "eval-t1": ("1", "rejection")}
MADE = ("recipe.yaml", "metrics.jsonl", "curves.png", "checkpoints", "export", "report.html")


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny-cpu.yaml")
    options, overrides = parser.parse_known_args()
    run: Path = options.output
    shutil.rmtree(run, ignore_errors=True)  # from nothing, each time
    begun = time.monotonic()
    _dflash("train", str(options.recipe), *overrides, "-o", str(run))
    trained = time.monotonic()
    _both(run)
    evaluated = time.monotonic()
    _dflash("report", str(run))
    found = {name: json.loads((run / f"{name}.json").read_text()) for name in EVALUATIONS}
    print(f"\ntrained in {trained - begun:.0f} s, evaluated in {evaluated - trained:.0f} s, "
          f"{time.monotonic() - begun:.0f} s in all; everything is in {run}")  # fmt: skip
    checks = [*_checks(found["eval-t0"], found["eval-t1"]), *_files(run)]
    for name, good in checks:
        print(f"{'ok     ' if good else 'MISSED '} {name}")
    return 0 if all(good for _, good in checks) else 1


def _dflash(*arguments: str) -> None:
    print("$ dflash", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "dflash", *arguments], check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)


def _both(run: Path) -> None:
    """The evaluations at once: each is one thread, and both its clocks run beside the other."""
    running = []
    for name, (temperature, rule) in EVALUATIONS.items():
        arguments = [
            "eval", str(run), "--temperature", temperature, "--rule", rule,
            "--max-new-tokens", str(NEW_TOKENS), "--json", str(run / f"{name}.json"),
        ]  # fmt: skip
        print("$ dflash", *arguments, "&", flush=True)
        command = [sys.executable, "-m", "dflash", *arguments]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    texts = [process.communicate()[0] for process in running]
    print("\n".join(texts))
    if any(process.returncode for process in running):
        sys.exit(1)


def _checks(greedy: dict[str, Any], sampled: dict[str, Any]) -> list[tuple[str, bool]]:
    prompts = greedy["sums"]["speculative"]["prompts"]
    return [
        (f"tau at temperature 0: {greedy['tau']:.2f} (at least 4.0, bonus included)",
         greedy["tau"] >= 4.0),
        (f"tau at temperature 1: {sampled['tau']:.2f} (at least 2.0, bonus included)",
         sampled["tau"] >= 2.0),
        (f"wall clock against plain cached decoding: {greedy['speedup']:.2f} x (at least 2.0)",
         greedy["speedup"] >= 2.0),
        (f"identical to plain greedy: {greedy['identical']} of {prompts} prompts (at least 50)",
         greedy["identical"] == prompts >= 50),
    ]  # fmt: skip


def _files(run: Path) -> list[tuple[str, bool]]:
    return [(f"{name} is in the run's folder", (run / name).exists()) for name in MADE]


if __name__ == "__main__":
    sys.exit(main())
