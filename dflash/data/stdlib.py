"""Text that every machine has: the running Python's standard library, split in two for good.

A file is held out if a hash of its path says so, whatever else is installed and in whatever order
the files are found: nobody who asks for the training files can meet a held-out one by accident.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from dflash.data.errors import DataError

HELD_OUT_SHARE = 0.03
# Other people's packages; and one generated module of documentation, 0.7 MB of prose in a string.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Sources:
    """Python files under ``root``, sorted by path; each is in exactly one of the two lists."""

    root: Path
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]


def stdlib_sources(root: str | Path | None = None) -> Sources:
    """The ``*.py`` files below ``root`` (None: this Python's standard library) that are UTF-8.

    Raises DataError where a list would be empty.
    """
    folder = Path(root or sysconfig.get_path("stdlib"))
    train: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if _LEFT_OUT.isdisjoint(relative.parts) and _is_utf8(path):
            (held_out if is_held_out(relative.as_posix()) else train).append(path)
    if not train or not held_out:
        raise DataError(
            f"{folder}: {len(train)} training and {len(held_out)} held-out Python files: name a "
            f"folder with more sources"
        )
    return Sources(folder, tuple(train), tuple(held_out))


def is_held_out(relative: str) -> bool:
    """Whether the file at this path (relative, with slashes) is kept from training: 3 % are."""
    digest = hashlib.sha256(relative.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def _is_utf8(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode())
    except (UnicodeDecodeError, OSError):
        return False
