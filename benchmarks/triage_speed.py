"""``harness triage`` beside GNU grep, over the same log in one run.

    python benchmarks/triage_speed.py              # 2 GiB, as promised
    python benchmarks/triage_speed.py --gib 0.25   # a quick look

Two logs are made: a calm one, and one with the tracebacks of three drafters in every
``--every-mib`` MiB. Each round runs ``LC_ALL=C grep -E`` with the pattern that ``harness triage
--grep`` prints (all that triage looks for), then ``harness triage --json`` as a command of its own
(interpreter start included), so that both meet the machine in the same state. Printed: the median
seconds, the ratio, and triage's peak memory.

Not covered: a cold disk (both read from the page cache after the first round), packed logs, and
logs in which everything fails: there triage parses every line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMISED_RATIO = {"failures": 5.0, "calm": 2.5}
PROMISED_MIB = 200
PIECE_LINES = 20_000

_TRACEBACK = """\
Exception in thread drafter-{n}:
Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1073, in _bootstrap_inner
    self.run()
  File "/usr/lib/python3.12/threading.py", line 1010, in run
    self._target(*self._args, **self._kwargs)
  File "/opt/train/drafter.py", line 90, in run
    loss = self.model(batch)
           ^^^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1779, in \
_wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1790, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/train/model.py", line 50, in forward
    return self.attend(q, k, v)
           ^^^^^^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.12/site-packages/torch/_dynamo/eval_frame.py", line 989, in \
compile_wrapper
    raise RuntimeError(
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. \
This is not supported at the moment.
"""


def make_log(path: Path, size: int, every: int | None) -> None:
    """Writes ``size`` bytes of steps of eight ranks; failures every ``every`` bytes, or none."""
    lines = [
        f"[rank{i % 8}]: 2026-03-14 09:{i // 60 % 60:02d}:{i % 60:02d},{i % 1000:03d} INFO loop "
        f"step={i} loss={(i * 7919 % 3000) / 1000:.4f} tokens/s={10_000 + i * 31 % 90_000} lr=3e-4 "
        f"grad_norm={(i * 31 % 997) / 997:.3f}\n"
        for i in range(PIECE_LINES)
    ]
    piece = "".join(lines).encode()
    failures = "".join(_TRACEBACK.format(n=n) for n in range(3)).encode()
    written = since = 0
    with path.open("wb") as out:
        while written < size:
            written += out.write(piece)
            since += len(piece)
            if every is not None and since >= every:
                written += out.write(failures)
                since = 0


def seconds(command: list[str]) -> tuple[float, int]:
    """Wall seconds of a command, and its exit code; what it prints goes to nowhere."""
    env = os.environ | {"LC_ALL": "C"}
    start = time.perf_counter()
    # A pipe, as in use: grep stops at the first match when it writes to /dev/null.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        while process.stdout.read(1 << 16):
            pass
    return time.perf_counter() - start, process.returncode


def peak_mib(path: Path) -> float:
    """Peak resident memory [MiB] of a triage of ``path``, in a process of its own."""
    code = (
        "import resource, sys; from harness.triage import triage_paths; triage_paths(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of each log")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every-mib", type=float, default=4.0, help="failures in so many MiB")
    parser.add_argument("--folder", type=Path, help="where the logs go (default: a temporary one)")
    options = parser.parse_args()
    kept = True
    pattern = subprocess.run(
        [sys.executable, "-m", "harness", "triage", "--grep"],
        capture_output=True, text=True, check=True,
    ).stdout.strip("\n")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, every in (("calm", None), ("failures", int(options.every_mib * (1 << 20)))):
            path = Path(folder, f"{name}.log")
            make_log(path, int(options.gib * (1 << 30)), every)
            rows: dict[str, list[float]] = {"grep": [], "triage": []}
            for _ in range(options.rounds):
                rows["grep"].append(seconds(["grep", "-E", pattern, str(path)])[0])
                taken, code = seconds(
                    [sys.executable, "-m", "harness", "triage", "--json", str(path)]
                )
                if code != (1 if every else 0):
                    print(f"error: triage ended with exit code {code}", file=sys.stderr)
                    return 1
                rows["triage"].append(taken)
            grep, triage = (statistics.median(rows[tool]) for tool in ("grep", "triage"))
            memory = peak_mib(path)
            limit = PROMISED_RATIO[name]
            met = triage / grep <= limit and memory < PROMISED_MIB
            kept = kept and met
            print(
                f"{name:8}  {path.stat().st_size / (1 << 30):.2f} GiB  grep {grep:.2f} s  "
                f"triage {triage:.2f} s  ratio {triage / grep:.2f} (at most {limit})  "
                f"peak {memory:.0f} MiB (below {PROMISED_MIB})  {'met' if met else 'NOT MET'}",
                flush=True,
            )
            path.unlink()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
