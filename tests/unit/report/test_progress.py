"""Lines about a run are printed as they are, whatever a file's name or content holds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dflash.progress import Progress


@pytest.mark.parametrize(
    "line",
    ["data/[train]/a.jsonl:1: role '[/INST]' is none of user", "queues [2, 2]", "a :smile: b"],
)
def test_what_looks_like_markup_is_text(line):
    out = io.StringIO()
    with Progress(3, console=Console(file=out, width=20)) as progress:
        progress.say(line)
    assert out.getvalue() == line + "\n"
