"""Does torch still work after a trial? Small programs that must, and a count of cache entries.

A canary runs when everybody has stopped. It covers what no single probe shows: damage to eager
modules, and a ``torch.compile`` that captures nothing without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def cache_entries(function: Callable[..., Any]) -> int | None:
    """How many compiled entries dynamo keeps for ``function``'s code; None where unreadable."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        return len(_debug_get_cache_entry_list(function.__code__))
    except (AttributeError, ImportError, TypeError):
        return None


def canary_eager_linear() -> str | None:
    """A plain eager ``nn.Linear`` still works; returns what went wrong, or None.

    After two overlapping FX traces ``nn.Module`` can stay patched, and then this raises
    ``NameError: module is not installed as a submodule`` (pytorch#112775).
    """
    import torch

    try:
        layer = torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(2))
            got = layer(torch.tensor([[1.0, 2.0]]))
        right = got.tolist() == [[1.0, 2.0]]
        return None if right else f"an identity nn.Linear gave {got.tolist()}"
    except Exception as error:
        return f"eager nn.Linear raised {type(error).__name__}: {error}"


def canary_fresh_compile() -> str | None:
    """A fresh ``torch.compile`` of an ``nn.Module`` still captures a graph.

    On torch 2.14.1 and 2.15.0 one overlap of a compile and a ``make_fx`` can leave every later
    compile capturing nothing and running eager, with no exception at all.
    """
    import torch

    graphs = 0

    def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        run: Callable[..., Any] = graph.forward
        return run

    try:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        with torch.no_grad():
            torch.compile(module, backend=counting)(torch.ones(1, 2))
    except Exception as error:
        return f"a fresh torch.compile raised {type(error).__name__}: {error}"
    return None if graphs else "a fresh torch.compile of an nn.Module captured 0 graphs"


CANARIES: dict[str, Callable[[], str | None]] = {
    "eager-linear": canary_eager_linear,
    "fresh-compile": canary_fresh_compile,
}


def run_canaries() -> dict[str, str | None]:
    """Name -> what is wrong, or None. Call it only when no other thread compiles."""
    return {name: canary() for name, canary in CANARIES.items()}
