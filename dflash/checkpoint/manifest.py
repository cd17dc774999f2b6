"""The manifest: which files a checkpoint has, their sizes and SHA-256 sums, and what wrote it.

It is written last into a checkpoint, so whatever has no manifest is not one. Format version 1:
`tensors.safetensors` (named tensors), `state.json` (anything that JSON can hold).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import dflash

MANIFEST = "manifest.json"
FORMAT = "dflash-checkpoint"
VERSION = 1


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; one line says which, why and what to do."""


def describe(step: int, files: Iterable[Path]) -> dict[str, Any]:
    """The manifest of `files`, which are read back from the disk for their sums."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "produced_by": {
            "dflash-trainer": dflash.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
        },
    }


def verify(folder: Path, step: int | None) -> dict[str, Any]:
    """Read the manifest of `folder` and compare every file with it; returns the manifest.

    step: what the manifest has to say; None = anything. Raises CheckpointError for what is no
    checkpoint, is of a newer format, or is damaged.
    """
    manifest = _read(folder)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: not a checkpoint of this trainer (format not {FORMAT!r})")
    version = manifest.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{folder}: damaged: {MANIFEST} gives no version")
    if version > VERSION:
        raise CheckpointError(
            f"{folder}: checkpoint format {version} is newer than this trainer's {VERSION}: "
            f"update dflash-trainer (it was written by {manifest.get('produced_by')})"
        )
    if not isinstance(manifest.get("step"), int) or step not in (None, manifest["step"]):
        raise CheckpointError(
            f"{folder}: damaged: {MANIFEST} says step {manifest.get('step')!r}, not {step}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{folder}: damaged: {MANIFEST} lists no files")
    for name, known in files.items():
        _compare(folder, name, known)
    return manifest


def _read(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        what = f"has no {MANIFEST}" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: not a checkpoint ({what})") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    except ValueError:  # not JSON, or not even text
        raise CheckpointError(f"{folder}: damaged: {MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{folder}: damaged: {MANIFEST} is not a mapping")
    return manifest


def _compare(folder: Path, name: str, known: Any) -> None:
    if Path(name).name != name or not isinstance(known, dict):
        raise CheckpointError(f"{folder}: damaged: {MANIFEST} has a bad entry {name!r}")
    path = folder / name
    try:
        size = path.stat().st_size
        if size != known.get("bytes"):
            raise CheckpointError(
                f"{folder}: damaged: {name} has {size} bytes, not {known.get('bytes')}"
            )
        if _sha256(path) != known.get("sha256"):
            raise CheckpointError(f"{folder}: damaged: {name} does not have its SHA-256 sum")
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: damaged: {name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {name} cannot be read ({error.strerror})") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
