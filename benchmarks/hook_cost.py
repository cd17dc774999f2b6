"""What hooks and the trainer's guard cost a warm flex_attention, forward and backward.

    python benchmarks/hook_cost.py [--rounds 60]

At the demo's shape, five variants in one process and interleaved, so that the machine's mood
meets all of them: a plain compiled function (A), the same once more (A/A: what the measurement
itself scatters), one that was compiled under hooks which are gone again (off), one under hooks,
further points, watch and recorder as a trial has them (on), and one behind the trainer's guard,
entered anew each round. Printed: the median of the rounds' ratios to A with its interval of 95 %,
and, from a trivial compiled function, what one call takes more in nanoseconds. Measured is the
process's processor time, bystander included: other programs' load does not count. Exit code 1
when a median is above its limit.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash.compile import compile_guard
from dflash.compile.flex_on_cpu import flex_training_on_cpu, training_backend
from harness.control import SWITCH_POINTS, Recorder
from harness.hooks import Hooks
from harness.watch import Watch

# recipes/tiny-cpu.yaml, and the bundled target's heads.
ROW, ANCHORS, BLOCK, HEADS, KEY_HEADS, WIDTH = 192, 32, 8, 3, 1, 64
QUERIES, KEYS = ANCHORS * BLOCK, ROW + ANCHORS * BLOCK
FLEX_CALLS, TRIVIAL_CALLS = 3, 300
NAMES = ("A", "A/A", "off", "on", "guard")
LIMITS = {"off": 1.02, "on": 1.3, "guard": 1.03}

Compile = Callable[..., Callable[..., torch.Tensor]]


def flex(compile_: Compile) -> Callable[[], None]:
    """One forward and backward of compiled flex_attention on fixed inputs."""
    attend = compile_(flex_attention, backend=training_backend("cpu"), dynamic=False)
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, QUERIES), (KEY_HEADS, KEYS), (KEY_HEADS, KEYS))
    q, k, v = (
        torch.randn(1, heads, length, WIDTH, generator=generator, requires_grad=True)
        for heads, length in shapes
    )
    mask = create_block_mask(
        lambda b, h, i, j: (j < ROW) | ((j - ROW) // BLOCK == i // BLOCK),
        None,
        None,
        QUERIES,
        KEYS,
        device="cpu",
    )

    def run() -> None:
        attend(q, k, v, block_mask=mask, enable_gqa=True).sum().backward()
        q.grad = k.grad = v.grad = None

    return run


def trivial(compile_: Compile) -> Callable[[], object]:
    """A compiled function that does next to nothing."""
    call = compile_(lambda t: t + 1, backend="eager", dynamic=False)
    x = torch.ones(4)
    return lambda: call(x)


def seconds(run: Callable[[], object], calls: int) -> float:
    """Processor time of one call, over a few."""
    begun = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begun) / calls


class Variants:
    """The variants of one program, measured in turn."""

    def __init__(self, make: Callable[[Compile], Callable[[], object]], calls: int) -> None:
        self._make, self._calls = make, calls
        self._watch, recorder = Watch(), Recorder("free")
        recorder.begin(["MainThread"])
        self._hooks = Hooks(self._watch.on_event, recorder.on_event, points=SWITCH_POINTS)
        self._plain = make(torch.compile)
        with self._hooks:
            self._hooked = make(torch.compile)
            self._hooked()
        for _ in range(2):
            self._plain()
            self._hooked()
        self.rounds: dict[str, list[float]] = {name: [] for name in NAMES}

    def run(self, rounds: int) -> None:
        """Each round measures each variant once, beginning with another one each time."""
        for number in range(rounds):
            first = number % len(NAMES)
            for name in NAMES[first:] + NAMES[:first]:
                self.rounds[name].append(self._measure(name))

    def _measure(self, name: str) -> float:
        if name == "on":
            with self._hooks, self._watch:
                return self._warm(self._hooked)
        if name == "guard":
            with compile_guard() as guard:
                return self._warm(self._make(guard.compile))
        return self._warm(self._hooked if name == "off" else self._plain)

    def _warm(self, run: Callable[[], object]) -> float:
        """Without the first calls after an exchange of code, which may also compile."""
        run()
        run()
        return seconds(run, self._calls)

    def ratio(self, name: str) -> tuple[float, float, float]:
        """The median of the rounds' ratios to A, and its interval of 95 % (by ranks)."""
        pairs = zip(self.rounds[name], self.rounds["A"], strict=True)
        ratios = sorted(x / a for x, a in pairs)
        away = 1.96 * math.sqrt(len(ratios)) / 2
        low = max(0, math.floor(len(ratios) / 2 - away))
        high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + away))
        return statistics.median(ratios), ratios[low], ratios[high]

    def more(self, name: str) -> float:
        """Seconds per call beyond A, the median of the rounds."""
        return statistics.median(
            x - a for x, a in zip(self.rounds[name], self.rounds["A"], strict=True)
        )


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="of all variants")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("--rounds must be positive")
    torch.set_num_threads(1)
    with flex_training_on_cpu():
        large = Variants(flex, FLEX_CALLS)
        large.run(rounds)
    small = Variants(trivial, TRIVIAL_CALLS)
    small.run(rounds)
    base = statistics.median(large.rounds["A"])
    what = f"flex forward and backward {base * 1e3:.1f} ms"
    print(f"torch {torch.__version__}, {rounds} rounds, {what}")
    print(f"{'variant':8} {'ratio':>7} {'95 % of it':>15} {'per call':>12}   limit of the ratio")
    code = 0
    for name in NAMES[1:]:
        middle, low, high = large.ratio(name)
        limit = LIMITS.get(name)
        within = limit is None or middle <= limit
        code |= not within
        said = "" if limit is None else f"<= {limit}{'' if within else '  EXCEEDED'}"
        more = f"{small.more(name) * 1e9:+.0f} ns"
        print(f"{name:8} {middle:7.3f} {low:7.3f} {high:7.3f} {more:>12}   {said}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
