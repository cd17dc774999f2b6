"""Whatever patches torch, or takes one of its repairs out, runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.isolate import Isolation


@pytest.fixture(scope="session")
def isolation() -> Iterator[Isolation]:
    with Isolation() as isolation:
        yield isolation


@pytest.fixture
def isolated(isolation: Isolation) -> Callable[..., Any]:
    """``isolated(function, **arguments)``: what the function returns in a fresh process.

    A skip in there is a skip here; any other end but a return is a failure.
    """

    def run(function: Callable[..., Any], **arguments: Any) -> Any:
        result = isolation.run(function, arguments, deadline=60)
        if result.ended != "returned":
            pytest.fail(f"{result.what}\n{result.error}\n{result.dump}\n{result.output}")
        if isinstance(result.value, dict) and "skip" in result.value:
            pytest.skip(result.value["skip"])
        return result.value

    return run
