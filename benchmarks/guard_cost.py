"""What each guard costs a warm call, side by side in one run.

    python benchmarks/guard_cost.py

Prints the time of one warm compiled call (a trivial function, so that only the overhead counts)
without a guard and behind each, as a ratio; and how long a warm call is held up while another
thread compiles. Each guard runs in a process of its own, since a guard exchanges torch's code.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time

CALLS, ROUNDS = 2000, 15


def measure(name: str) -> dict[str, float]:
    """Seconds per warm call (median of rounds), and the longest call beside a compile."""
    import torch

    from dflash.compile import compile_guard

    torch.set_num_threads(1)
    x = torch.ones(4)
    if name == "none":
        compiled = torch.compile(lambda t: t + 1, backend="eager", dynamic=False)
        return _times(compiled, x, lambda f: torch.compile(f, backend="aot_eager"))
    with compile_guard(name) as guard:
        compiled = guard.compile(lambda t: t + 1, label="warm", backend="eager")
        if name == "serial":
            guard.warm_up({"warm": lambda: compiled(x)})
            return _times(compiled, x, None)
        return _times(compiled, x, lambda f: guard.compile(f, label="cold", backend="aot_eager"))


def _times(compiled, x, compile_another) -> dict[str, float]:  # type: ignore[no-untyped-def]
    compiled(x)
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            compiled(x)
        rounds.append((time.perf_counter() - begun) / CALLS)
    result = {"call": statistics.median(rounds)}
    if compile_another is not None:
        import torch

        cold = compile_another(lambda t: (t.sin() @ t.cos().T).relu().sum())
        y = torch.ones(8, 8, requires_grad=True)
        begun = time.perf_counter()
        thread = threading.Thread(target=lambda: cold(y))
        thread.start()
        longest = 0.0
        while thread.is_alive():
            start = time.perf_counter()
            compiled(x)
            longest = max(longest, time.perf_counter() - start)
        result |= {"longest": longest, "compile": time.perf_counter() - begun}
    return result


def main() -> None:
    """Runs every guard in its own process and prints the table."""
    names = ("none", "thread-local", "force-compile", "lock", "serial")
    results = {}
    for name in names:
        out = subprocess.run(
            [sys.executable, __file__, name], capture_output=True, text=True, check=True
        )
        results[name] = json.loads(out.stdout.splitlines()[-1])
    base = results["none"]["call"]
    print(f"{'guard':14} {'warm call':>10} {'ratio':>6}   longest warm call beside a compile")
    for name, result in results.items():
        beside = (
            f"{result['longest'] / result['compile']:.0%} of the compile"
            if "longest" in result
            else "-"
        )
        print(f"{name:14} {result['call'] * 1e6:8.1f}us {result['call'] / base:6.2f}   {beside}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
