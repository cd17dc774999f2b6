"""Plain programs for the search and for forced schedules: nothing in them knows of the harness.

Each returns what its threads run. They are small, so that a schedule takes a fraction of a second
in a fresh process, and natural: no thread does anything that a user's program would not do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Threads = list[Callable[[], object]]

LENGTHS = (32, 64)  # of the rows in `warm_beside_recompile`


def _survive_cuda_build_without_gpu() -> None:
    """Up to 2.12 such a build crashes in the second thread that traces; that is not the point."""
    ensure = hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    if ensure and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def two_traces() -> Threads:
    """Two threads trace something at the same time: state of torch stays behind."""
    _survive_cuda_build_without_gpu()
    return [_make_fx, _make_fx]


def one_trace_one_bystander() -> Threads:
    """A control: a trace beside a thread that only waits for its turn at a lock."""
    import torch._dynamo.convert_frame as convert_frame

    def bystander() -> None:
        with convert_frame.compile_lock:
            pass

    return [_make_fx, bystander]


def two_compiles() -> Threads:
    """A control: dynamo's own lock keeps two compiles apart."""
    return [_compiled(torch.sin), _compiled(torch.cos)]


def compile_beside_trace() -> Threads:
    """thread-0 compiles, thread-1 traces with make_fx, which takes no lock."""
    _survive_cuda_build_without_gpu()
    return [_compiled(torch.sin), _make_fx]


def two_masks() -> Threads:
    """Two threads build a BlockMask, as drafters do before each step."""
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q >= k

    def build() -> object:
        return create_block_mask(causal, None, None, 128, 128, device="cpu")

    return [build, build]


def warm_beside_recompile(steps: int = 2, warm: bool = False) -> Threads:
    """Three drafters attend with their compiled flex_attention, forward and backward.

    Two keep their row length; in its second step thread-1 meets another one and compiles again.
    With ``warm`` all three have compiled for the first one before any thread begins.
    """
    import torch.nn.attention.flex_attention as flex

    flex._validate_device = lambda *_: None  # CPU training is refused by this check alone
    torch.set_num_threads(1)
    _survive_cuda_build_without_gpu()

    def drafter(lengths: tuple[int, ...]) -> Callable[[], object]:
        attend = torch.compile(flex.flex_attention, backend="aot_eager", dynamic=False)

        def step(length: int) -> None:
            q, k, v = (torch.ones(1, 1, length, 16, requires_grad=True) for _ in range(3))
            attend(q, k, v).sum().backward()

        def work() -> None:
            for length in lengths:
                step(length)

        if warm:
            step(lengths[0])
        return work

    short, long = LENGTHS
    lengths = [(short, short), (short, long), (short, short)]
    return [drafter(one[:steps]) for one in lengths]


def _make_fx() -> object:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: x.sin())(torch.ones(2))


def _compiled(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
    compiled = torch.compile(lambda x: function(x) * 2, backend="aot_eager")

    def work() -> None:
        compiled(torch.ones(2, requires_grad=True)).sum().backward()

    return work


def two_locks() -> Threads:
    """A deadlock of the program's own, which nobody has told the harness of."""
    import threading

    import torch._dynamo.convert_frame as convert_frame

    own = threading.Lock()

    def first() -> None:
        with own, convert_frame.compile_lock:
            pass

    def second() -> None:
        with convert_frame.compile_lock, own:
            pass

    return [first, second]


def crash_in_the_second_order() -> Threads:
    """Dies in one of the two orders only."""
    import os
    import signal

    done: list[int] = []

    def first() -> None:
        done.append(1)

    def second() -> None:
        if not done:
            os.kill(os.getpid(), signal.SIGSEGV)

    return [first, second]


def broken() -> Threads:
    """Fails before there is any thread."""
    raise LookupError("no such data")


def another_one_each_time(folder: str) -> Threads:
    """In its first run a thread takes a lock three times, in each later one once."""
    from pathlib import Path

    import torch._dynamo.convert_frame as convert_frame

    seen = Path(folder, "seen")
    times = 1 if seen.exists() else 3
    seen.touch()

    def work() -> None:
        for _ in range(times):
            with convert_frame.compile_lock:
                pass

    return [work, work]
