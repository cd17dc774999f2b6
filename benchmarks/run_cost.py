"""What `harness run` costs a program: plain, with --no-hooks, and with hooks, side by side.

    python benchmarks/run_cost.py [--rounds 5]

Prints, per mode, the start of an interpreter that imports nothing, the time of a warm compiled
call of a trivial function (only overhead counts there), and of a warm flex_attention forward and
backward of 2 heads x 512 tokens x 64 (what a small training step does). The modes take turns; a
process gives the fastest of its 7 rounds, the ratio is that of the medians over the processes, and
the last line is the spread of the plain processes themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

HARNESS = [sys.executable, "-m", "harness", "run"]
MODES = {"plain": [], "--no-hooks": [*HARNESS, "--no-hooks", "--"], "hooks": [*HARNESS, "--"]}
WARM = 2000


def measure() -> None:
    """In the measured process: prints seconds per call as JSON."""
    import torch
    import torch.nn.attention.flex_attention as flex

    torch.set_num_threads(1)
    flex._validate_device = lambda *_: None  # gradients on a CPU
    trivial = torch.compile(lambda t: t + 1, backend="eager", dynamic=False)
    attention = torch.compile(flex.flex_attention, backend="aot_eager", dynamic=False)
    x = torch.ones(4)
    q, k, v = (torch.randn(1, 2, 512, 64, requires_grad=True) for _ in range(3))
    block_mask = flex.create_block_mask(
        lambda _b, _h, i, j: i >= j, None, None, 512, 512, device="cpu"
    )

    def step() -> None:
        attention(q, k, v, block_mask=block_mask).square().mean().backward()

    seconds = {}
    for name, call, count in (("trivial", lambda: trivial(x), WARM), ("flex", step, 20)):
        call()
        rounds = []
        for _ in range(7):
            begun = time.perf_counter()
            for _ in range(count):
                call()
            rounds.append((time.perf_counter() - begun) / count)
        seconds[name] = min(rounds)  # other work on the machine only adds
    print(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    found: dict[str, dict[str, list[float]]] = {
        mode: {"trivial": [], "flex": [], "start": []} for mode in MODES
    }
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for mode, prefix in MODES.items():
                command = [*prefix, sys.executable, __file__, "--measure"]
                done = subprocess.run(
                    command, capture_output=True, text=True, cwd=folder, check=True, timeout=300
                )
                for name, seconds in json.loads(done.stdout).items():
                    found[mode][name].append(seconds)
                # The command's own start is not the program's: the child says when it was born.
                text = "import time; print(time.process_time())"
                done = subprocess.run(
                    [*prefix, sys.executable, "-c", text],
                    **{"capture_output": True, "text": True, "cwd": folder, "timeout": 60},
                    check=True,
                )
                found[mode]["start"].append(float(done.stdout))
    print(f"{'':12}{'interpreter':>16}{'trivial call':>18}{'flex fwd+bwd':>20}")
    for mode in MODES:
        cells = []
        for name, unit, factor in (
            ("start", "ms", 1e3),
            ("trivial", "us", 1e6),
            ("flex", "ms", 1e3),
        ):
            here, plain = (statistics.median(found[m][name]) for m in (mode, "plain"))
            cells.append(f"{here * factor:8.2f} {unit} {here / plain:5.3f}")
        print(f"{mode:12}{'   '.join(cells)}")
    spread = {name: max(values) / min(values) for name, values in found["plain"].items() if values}
    told = ", ".join(f"{name} {ratio:.3f}" for name, ratio in spread.items())
    print(f"plain against itself, longest by shortest: {told}")


if __name__ == "__main__":
    main()
