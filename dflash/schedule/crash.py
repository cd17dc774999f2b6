"""What is written when a run dies: one folder that says who, where, and what everybody else did."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.schedule.stop import Stopper
from dflash.schedule.worker import Worker

# Environment switches that change how torch compiles or which devices it sees; nothing else is
# written, so that no secret can be.
_SWITCHES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "TRITON_CACHE", "CUDA_LAUNCH_BLOCKING")


def write_crash_report(
    folder: Path,
    stopper: Stopper,
    workers: Sequence[Worker],
    facts: Mapping[str, Any],
) -> Path:
    """Writes ``crash/report.json`` and ``crash/stacks.txt`` below ``folder``; returns the folder.

    The stacks are those at the moment of the failure, before anybody was woken.

    Raises OSError where the folder cannot be written.
    """
    crash = folder / "crash"
    crash.mkdir(parents=True, exist_ok=True)
    (crash / "stacks.txt").write_text(stopper.stacks)
    report = {
        "reason": stopper.reason,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _SWITCHES or name.startswith(_PREFIXES)
        },
        "state": compile_state(),
        "workers": [
            {
                "worker": worker.name,
                "alive": worker.is_alive(),
                "activity": worker.clock.activity,
                "since_seconds": round(time.monotonic() - worker.clock.since, 3),
                "packet": worker.clock.packet,
                "packets_done": worker.clock.packets,
                "traceback": worker.trace,
            }
            for worker in workers
        ],
        **facts,
    }
    (crash / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    return crash


def compile_state() -> dict[str, str]:
    """The tracing state that threads share, as the calling thread sees it now."""
    import torch.fx._symbolic_trace as symbolic_trace
    import torch.fx.traceback as fx_traceback
    from torch._dynamo import eval_frame

    return {
        "fx-patcher": "at rest" if symbolic_trace.CURRENT_PATCHER is None else "installed",
        "is-compiling": str(torch.compiler.is_compiling()),
        "traceback-meta": str(getattr(fx_traceback, "current_meta", "unknown")),
        "stance": str(getattr(getattr(eval_frame, "_stance", None), "stance", "unknown")),
    }
