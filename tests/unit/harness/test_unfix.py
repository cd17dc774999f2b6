"""Taking a repair out changes what torch does, says so, and does nothing where there is none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as st

from harness.isolate import Isolation
from harness.unfix import CATALOGUE, UnfixError, unfix

HAS_SESSION = hasattr(torch.compiler, "_compile_session_context")
HAS_THREAD_LOCAL_FLAG = hasattr(st, "_is_fx_tracing_tls")
REPAIRS = {
    "session-flag": HAS_SESSION,
    "fx-flag-thread-local": HAS_THREAD_LOCAL_FLAG,
    "fx-tracing-flag": HAS_SESSION or HAS_THREAD_LOCAL_FLAG,
}


def _in_another_thread(question: Any) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(question()))
    thread.start()
    thread.join()
    return answers[0]


def behaviour(*, names: list[str]) -> dict[str, Any]:
    """Runs in its own process: what a second thread sees of the first one's compile and trace."""
    done = unfix(names)
    seen: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        seen["compiling"] = _in_another_thread(torch.compiler.is_compiling)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    def traced(x: Any) -> Any:
        seen["tracing"] = _in_another_thread(st.is_fx_tracing)
        return x + 1

    torch.fx.symbolic_trace(traced)
    seen["tracing afterwards"] = st.is_fx_tracing()
    return seen | {"done": done}


@pytest.mark.parametrize("name", [None, *CATALOGUE])
def test_an_unfix_takes_out_its_repair_and_no_other(isolation: Isolation, name: str | None) -> None:
    result = isolation.run(behaviour, {"names": [name] if name else []}, deadline=60)
    assert result.ended == "returned", result.error
    session_out = name in ("session-flag", "fx-tracing-flag")
    flag_out = name in ("fx-flag-thread-local", "fx-tracing-flag")
    assert result.value == {
        "compiling": HAS_SESSION and not session_out,
        "tracing": flag_out or not HAS_THREAD_LOCAL_FLAG,
        "tracing afterwards": False,
        "done": {name: REPAIRS[name]} if name else {},
    }


def test_several_are_applied_and_reported_each() -> None:
    assert unfix([]) == {}
    assert set(REPAIRS) == set(CATALOGUE), "each row has its control above"


def test_an_unknown_unfix_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnfixError, match="unknown unfix 'everything': there are session-flag, "):
        unfix(["everything"])
