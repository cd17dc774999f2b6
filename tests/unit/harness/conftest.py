"""One fork server for the tests that dirty torch's state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.isolate import Isolation


@pytest.fixture(scope="session")
def isolation() -> Iterator[Isolation]:
    """Preloads what the cases use, so that each of them starts in a fraction of a second."""
    preload = ("torch", "torch._dynamo", "torch._dynamo.backends.debugging", "pytest")
    with Isolation(preload=preload) as opened:
        yield opened
