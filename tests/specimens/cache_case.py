"""One compile by Inductor on a given cache folder, in the process of an isolated case."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch


def compile_once(
    *, folder: str, kill_at: str = "", clear: str = "", lock_patience: int = 600
) -> dict[str, Any]:
    """Compiles and calls one small function; says what the caches did and what was logged.

    Args:
        folder: the cache folder.
        kill_at: the process kills itself when it is about to give an entry below a folder of
            this name its final name.
        clear: this folder below it is removed, as by another worker, when an entry in it has been
            found and is about to be listed.
        lock_patience: seconds that Inductor waits for a lock file.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.set_num_threads(1)
    from torch._dynamo.utils import counters
    from torch._inductor import codecache

    codecache.LOCK_TIMEOUT = lock_patience
    told: list[str] = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda entry: told.append(entry.getMessage())  # type: ignore[method-assign]
    for name in ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache"):
        logging.getLogger(name).addHandler(handler)
    if kill_at:
        _kill_before_rename(kill_at)
    if clear:
        _clear_when_listed(folder, clear)
    x = torch.linspace(0, 1, 64)
    raised, difference = "", None
    try:
        got = torch.compile(_function, backend="inductor")(x)
        difference = float((got - _function(x)).abs().max())
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    wanted = {
        "aot hit": ("aot_autograd", "autograd_cache_hit"),
        "aot miss": ("aot_autograd", "autograd_cache_miss"),
        "aot saved": ("aot_autograd", "autograd_cache_saved"),
        "graph hit": ("inductor", "fxgraph_cache_hit"),
        "graph miss": ("inductor", "fxgraph_cache_miss"),
    }
    return {
        "raised": raised,
        "difference": difference,
        "told": told,
        "counts": {name: counters[group][key] for name, (group, key) in wanted.items()},
        "left": sorted(path.name for path in Path(folder).rglob("*.tmp")),
    }


def _function(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + 1


def _kill_before_rename(below: str) -> None:
    rename = Path.rename

    def watched(self: Path, target: Any) -> Path:
        if below in Path(target).parts:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = watched  # type: ignore[method-assign]


def _clear_when_listed(folder: str, below: str) -> None:
    listdir = os.listdir

    def watched(path: Any = ".") -> list[str]:
        if below in Path(os.fsdecode(path)).parts:
            shutil.rmtree(Path(folder, below))
            os.listdir = listdir
        return listdir(path)

    os.listdir = watched
