"""Somebody's training program: three threads share one compiled flex_attention.

usage: python drafters.py STEPS [--forward-only] [--together] [--uncaught]

It knows nothing of the harness. Thread i starts when thread i-1 has done two steps (with
--together all start at once), every fourth step brings a new length, so that one thread recompiles
while the others are warm. Like many programs it keeps a thread's exception and tells it at the
end; with --uncaught it lets it pass.
"""

from __future__ import annotations

import sys
import threading

import torch
import torch._dynamo
import torch.nn.attention.flex_attention as flex

flex._validate_device = lambda *_: None  # lets flex_attention have gradients on a CPU
torch.set_num_threads(1)
if hasattr(torch._C, "_ensureCUDADeviceGuardSet") and not torch.cuda.is_available():
    # Up to 2.12 a CUDA build without a GPU crashes in the second thread that traces.
    torch._C._ensureCUDADeviceGuardSet = lambda: None

STEPS = int(sys.argv[1])
GRADIENTS = "--forward-only" not in sys.argv
attention = torch.compile(flex.flex_attention, backend="aot_eager", dynamic=False)
warm = [threading.Event() for _ in range(4)]
errors: dict[str, BaseException] = {}


def causal(_batch, _head, query, key):
    return query >= key


def step(index: int, number: int) -> None:
    length = 128 * (index + 1) * (1 + number // 4)
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=GRADIENTS) for _ in range(3))
    mask = flex.create_block_mask(causal, None, None, length, length, device="cpu")
    out = attention(q, k, v, block_mask=mask)
    if GRADIENTS:
        out.square().mean().backward()


def drafter(index: int) -> None:
    torch._dynamo.config.recompile_limit = 64  # belongs to the thread since torch 2.12
    try:
        warm[index].wait(30)
        for number in range(STEPS):
            step(index, number)
            if number == 1:
                warm[index + 1].set()
    except Exception as error:
        if "--uncaught" in sys.argv:
            raise
        errors[threading.current_thread().name] = error
    finally:
        warm[index + 1].set()


for event in warm if "--together" in sys.argv else warm[:1]:
    event.set()
threads = [threading.Thread(target=drafter, args=(i,), name=f"drafter-{i}") for i in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name, error in errors.items():
    print(name, type(error).__name__, str(error)[:60])
print("failed", len(errors))
