"""Failures as the crash folder's tests need them."""

from __future__ import annotations

from harness.capture import capture_error


def failure(message: str = "it broke", culprit: bool = True) -> dict:
    """A failure as `harness run` records it."""
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        captured = capture_error(error).as_dict()
    frame = {"file": "/x/site-packages/torch/fx/_symbolic_trace.py", "line": 7, "function": "trace"}
    frame |= {"source": "graph = root()", "role": "passed through", "central": True}
    holder = {
        "thread": "drafter-0",
        "state": "fx-tracing-flag",
        "how": "inside",
        "span": {"thread": "drafter-0", "kind": "trace", "start": 1.0, "end": 2.0},
        "stack": [frame],
    }
    return {
        "thread": "drafter-1",
        "t": 1.75,
        "where": "compiled call",
        "died": True,
        "error": captured,
        "stack": [],
        "window": {"thread": "drafter-1", "kind": "call", "start": 1.5, "end": None},
        "culprit": holder if culprit else None,
        "others": [],
        "probes": {"fx-tracing-flag": "True"},
    }


def content(**more) -> dict:
    return {"harness": "0", "origin": "run", "failures": [failure()], "threads": [], **more}
