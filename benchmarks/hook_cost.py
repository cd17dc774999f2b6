"""What the harness's hooks cost a warm flex_attention, forward and backward, at the demo's shape.

    python benchmarks/hook_cost.py

Four variants in one process and interleaved, so that the machine's mood meets all of them: a
plain compiled function (A), the same once more (A/A: what the measurement itself scatters), one
that was compiled under hooks which are gone again (off), and one under hooks, further points,
watch and recorder as a trial has them (on). Printed: the median of the rounds' ratios to A, their
quartiles, and, from a trivial compiled function, what one call takes more in nanoseconds. Measured
is the process's processor time, bystander included: other programs' load does not count. Exit
code 1 above the limits.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash.compile.flex_on_cpu import flex_training_on_cpu, training_backend
from harness.control import SWITCH_POINTS, Recorder
from harness.hooks import Hooks
from harness.watch import Watch

# recipes/tiny-cpu.yaml: rows of 256 tokens, 64 anchors, blocks of 8; the bundled target's heads.
QUERIES, KEYS, HEADS, KEY_HEADS, WIDTH = 64 * 8, 256 + 64 * 8, 3, 1, 64
ROUNDS, FLEX_CALLS, TRIVIAL_CALLS = 24, 2, 300
LIMITS = {"off": 1.02, "on": 1.3}


def step(attend: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """One forward and backward of ``attend`` on fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, QUERIES), (KEY_HEADS, KEYS), (KEY_HEADS, KEYS))
    q, k, v = (
        torch.randn(1, heads, length, WIDTH, generator=generator, requires_grad=True)
        for heads, length in shapes
    )
    mask = create_block_mask(
        lambda b, h, i, j: (j < 256) | ((j - 256) // 8 == i // 8),
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


def compiled() -> Callable[..., torch.Tensor]:
    """A wrapper of its own; all share one compiled code."""
    return torch.compile(flex_attention, backend=training_backend("cpu"), dynamic=False)


def seconds(run: Callable[[], object], calls: int) -> float:
    """Processor time of one call, over a few."""
    begun = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begun) / calls


class Variants:
    """The four variants of one program, measured in turn."""

    def __init__(self, make: Callable[[], Callable[[], object]], calls: int) -> None:
        self._calls = calls
        self._watch, recorder = Watch(), Recorder("free")
        recorder.begin(["MainThread"])
        self._hooks = Hooks(self._watch.on_event, recorder.on_event, points=SWITCH_POINTS)
        self._plain = make()
        with self._hooks:
            self._hooked = make()
            self._hooked()
        for _ in range(2):
            self._plain()
            self._hooked()
        self.rounds: dict[str, list[float]] = {name: [] for name in ("A", "A/A", "off", "on")}

    def run(self, rounds: int) -> None:
        """Each round measures each variant once, beginning with another one each time."""
        names = list(self.rounds)
        for number in range(rounds):
            for name in names[number % 4 :] + names[: number % 4]:
                self.rounds[name].append(self._measure(name))

    def _measure(self, name: str) -> float:
        if name != "on":
            return seconds(self._hooked if name == "off" else self._plain, self._calls)
        with self._hooks, self._watch:
            self._hooked()  # the first call after the exchange of code
            return seconds(self._hooked, self._calls)

    def ratios(self, name: str) -> list[float]:
        """Round by round, to A; its quartiles."""
        pairs = zip(self.rounds[name], self.rounds["A"], strict=True)
        return statistics.quantiles([x / a for x, a in pairs], n=4)

    def more(self, name: str) -> float:
        """Seconds per call beyond A, the median of the rounds."""
        return statistics.median(
            x - a for x, a in zip(self.rounds[name], self.rounds["A"], strict=True)
        )


def trivial() -> Callable[[], object]:
    """A compiled function that does next to nothing."""
    call = torch.compile(lambda t: t + 1, backend="eager", dynamic=False)
    x = torch.ones(4)
    return lambda: call(x)


def main() -> int:
    """Measures and prints; returns the exit code."""
    torch.set_num_threads(1)
    with flex_training_on_cpu():
        flex = Variants(lambda: step(compiled()), FLEX_CALLS)
        flex.run(ROUNDS)
    small = Variants(trivial, TRIVIAL_CALLS)
    small.run(ROUNDS)
    base = statistics.median(flex.rounds["A"])
    what = f"flex forward and backward {base * 1e3:.1f} ms"
    print(f"torch {torch.__version__}, {ROUNDS} rounds, {what}")
    print(f"{'variant':8} {'ratio':>7} {'quartiles':>15} {'per call':>12}   limit of the ratio")
    code = 0
    for name in ("A/A", "off", "on"):
        low, middle, high = flex.ratios(name)
        limit = LIMITS.get(name)
        within = limit is None or middle <= limit
        code |= not within
        said = "" if limit is None else f"<= {limit}{'' if within else '  EXCEEDED'}"
        more = f"{small.more(name) * 1e9:+.0f} ns"
        print(f"{name:8} {middle:7.3f} {low:7.3f} {high:7.3f} {more:>12}   {said}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
