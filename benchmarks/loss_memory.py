"""Peak memory of the chunked block loss against the unchunked one, forward and backward.

Each runs in a fresh process on the CPU; what counts is how far the process's resident-set peak
rises above its size once the inputs and the head are there. ``python benchmarks/loss_memory.py``
prints both peaks and their ratio, and fails above ``--limit`` (0.15). The full size (vocabulary
151,936, 8,192 slots) needs about 40 GB for the unchunked loss: run it alone. On a smaller machine
``--unchunked-share 0.5`` runs that loss on half the slots and doubles its peak, which grows in
proportion to the slots.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

BLOCK = 16


def measure(kind: str, vocabulary: int, slots: int, hidden_size: int, chunk: int) -> None:
    """Runs one loss once; prints its rise in bytes, seconds and value as JSON."""
    import torch
    from torch import nn

    from dflash.config import ObjectiveSettings
    from dflash.objective import block_metrics, decay_weights, decayed_cross_entropy
    from dflash.objective.chunked import block_objective

    torch.manual_seed(0)
    head = nn.Linear(hidden_size, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(slots // BLOCK, BLOCK, hidden_size, requires_grad=True)
    labels = torch.randint(vocabulary, hidden.shape[:2])
    counted = torch.ones_like(labels, dtype=torch.bool)
    counted[:, 0] = False
    before = resident_peak()
    begin = time.perf_counter()
    if kind == "chunked":
        settings = ObjectiveSettings(head_chunk_slots=chunk)
        loss, metrics = block_objective(hidden, head, labels, counted, settings)
    else:
        logits = head(hidden)
        loss = decayed_cross_entropy(logits, labels, counted, decay_weights(BLOCK))
        metrics = block_metrics(logits.detach(), labels, counted)
    loss.numerator.backward()
    assert hidden.grad is not None
    answer = {
        "bytes": resident_peak() - before,
        "seconds": time.perf_counter() - begin,
        "loss": float(loss.numerator.detach()),
        "gradient": float(hidden.grad.norm()),
        "correct": int(metrics.correct.sum()),
    }
    print(json.dumps(answer))


def resident_peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> int:
    """Measures both losses and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=None, help="default: the recipe's")
    parser.add_argument("--unchunked-share", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--only", choices=["chunked", "unchunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.chunk is None:
        from dflash.config import ObjectiveSettings

        options.chunk = ObjectiveSettings().head_chunk_slots
    if options.only:
        sizes = (options.vocabulary, options.slots, options.hidden_size, options.chunk)
        measure(options.only, *sizes)
        return 0
    results = {}
    for kind, share in (("chunked", 1.0), ("unchunked", options.unchunked_share)):
        slots = int(options.slots * share) // BLOCK * BLOCK
        arguments = [
            f"--vocabulary={options.vocabulary}", f"--slots={slots}",
            f"--hidden-size={options.hidden_size}", f"--chunk={options.chunk}",
        ]  # fmt: skip
        command = [sys.executable, __file__, f"--only={kind}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"{kind}: failed with {done.returncode} (out of memory?)\n{done.stderr}")
            return 1
        results[kind] = json.loads(done.stdout.splitlines()[-1])
        results[kind]["bytes"] *= options.slots / slots
        print(
            f"{kind}, {slots} slots:",
            "  ".join(f"{key} {value:,.6g}" for key, value in results[kind].items()),
        )
    ratio = results["chunked"]["bytes"] / results["unchunked"]["bytes"]
    verdict = "within" if ratio <= options.limit else "above"
    print(f"chunked / unchunked peak: {ratio:.1%}, {verdict} the limit of {options.limit:.0%}")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
