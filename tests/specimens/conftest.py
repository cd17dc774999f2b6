"""One fork server for the specimens; it has imported what they and the guard need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.explore import PRELOADED
from harness.isolate import Isolation


@pytest.fixture(scope="session")
def isolation() -> Iterator[Isolation]:
    """Every case is a fork of it, with caches of its own."""
    with Isolation(preload=(*PRELOADED, "dflash.compile")) as opened:
        yield opened
