"""How often `harness run` sees a race that hardly shows by itself, without a seed and with one.

    python benchmarks/perturb.py [--runs 10] [--steps 1]

The program is tests/unit/harness/foreign/drafters.py: three drafter threads that start at once
and call one compiled flex_attention without gradients, STEPS times. Each run is a fresh process.
Where torch has the repair, it is taken out (`--unfix fx-tracing-flag`). Printed: in how many runs
a thread died, plain, under hooks only, and with each of the seeds from 1 on. Exit code 1 when the
seeds found it in no run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "unit" / "harness" / "foreign" / "drafters.py"
DEADLINE = 120.0  # seconds for one run


def failed(steps: int, *options: str, run: bool = True) -> bool:
    """Whether a thread of the program died.

    Raises:
        RuntimeError: the program or the harness did not run.
    """
    program = [sys.executable, str(PROGRAM), str(steps), "--forward-only", "--together"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "run", "--report", f"{folder}/report"]
        done = subprocess.run(
            [*command, *options, "--", *program] if run else program,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": folder},
        )
    last = next((line for line in done.stdout.splitlines() if line.startswith("failed ")), None)
    if last is None:
        raise RuntimeError(f"the program did not end: {done.stdout}{done.stderr}")
    return last != "failed 0"


def main() -> int:
    """Runs all and prints the counts; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="of each kind; seeds 1 to N")
    parser.add_argument("--steps", type=int, default=1, help="calls of each thread")
    options = parser.parse_args()
    if options.runs < 1 or options.steps < 1:
        parser.error("--runs and --steps must be positive")
    import torch

    repaired = hasattr(torch.compiler, "_compile_session_context")
    unfix = ("--unfix", "fx-tracing-flag") if repaired else ()
    print(f"torch {torch.__version__}, {' '.join(unfix) or 'as it is'}, {options.steps} steps")
    runs, steps = range(1, options.runs + 1), options.steps
    if not repaired:  # the plain program has nothing that takes the repair out
        print(f"plain          {sum(failed(steps, run=False) for _ in runs):3} of {len(runs)}")
    print(f"hooks only     {sum(failed(steps, *unfix) for _ in runs):3} of {len(runs)}", flush=True)
    found = [seed for seed in runs if failed(steps, *unfix, "--perturb", str(seed))]
    print(f"seeds 1 to {len(runs):<4}{len(found):3} of {len(runs)}: {', '.join(map(str, found))}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
