"""The card of a tiny target, and the list of files that it has not seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dflash.data.stdlib import Sources

HELD_OUT_LIST = "held-out.txt"


def write_card(
    folder: Path,
    *,
    settings: dict[str, Any],
    command: str,
    sources: Sources,
    steps: int,
    tokens: int,
    seconds: float,
    threads: int,
    machine: str,
    bits: float,
) -> None:
    """Writes README.md and held-out.txt (paths below the standard library, one a line).

    settings: the training's. tokens, seconds: spent in training. machine: what it ran on, in
    words. bits: bits per byte over all held-out files.
    """
    names = [path.relative_to(sources.root).as_posix() for path in sources.held_out]
    (folder / HELD_OUT_LIST).write_text("".join(f"{name}\n" for name in names))
    train_bytes, held_out_bytes = (
        sum(path.stat().st_size for path in files) for files in (sources.train, sources.held_out)
    )
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    shape = ", ".join(f"{name} {value}" for name, value in settings.items())
    (folder / "README.md").write_text(
        f"""---
license: apache-2.0
library_name: transformers
tags: [dflash, byte-level, test-model]
---

# A tiny byte-level target

A causal language model of the Qwen3 architecture that is just good enough to be worth drafting
for: it makes demos and tests of a DFlash trainer possible on a CPU and without a network. It
writes Python-like text and is of no other use.

| | |
|---|---|
| held-out bits per byte | **{bits:.3f}** ({len(names)} files, {held_out_bytes:,} bytes) |
| made by | `{command}` |
| training | {steps:,} steps, {tokens:,} tokens (= bytes) in rows drawn at random |
| time | {seconds / 60:.0f} minutes on {threads} thread{"s" * (threads > 1)} of {machine} |
| data | Python {version}'s standard library: {len(sources.train):,} files, {train_bytes:,} bytes |
| weights | bfloat16 |

**Data.** The `*.py` files of the standard library, its tests included, without `pydoc_data` (one
generated module of prose) and without installed packages. A file is held out if a hash of its path
says so (3 %); those are in `{HELD_OUT_LIST}` and were never trained on. The sources are under the
Python Software Foundation licence.

**Tokenizer.** Token i is byte i of the UTF-8 text; 256 is `<|endoftext|>`, which stands before
every file; rows 257 and up are unused, and 257 is the drafter's mask token.

**Measured by** `python -m dflash.target.bits FOLDER`: every held-out byte is scored once, in
windows of 512 tokens that overlap by half, so that after the first window each byte has at least
256 before it.

**Shape and training.** {shape}. Muon for the matrices and AdamW for the rest, bfloat16 autocast.
"""
    )
