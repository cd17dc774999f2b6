"""Plain programs for the search: nothing in them knows of the harness."""

from __future__ import annotations

from collections.abc import Callable

import torch


def two_traces() -> list[Callable[[], object]]:
    """Two threads trace something each, at the same time: state of torch stays behind."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def trace() -> object:
        return make_fx(lambda x: x.sin())(torch.ones(2))

    return [trace, trace]
