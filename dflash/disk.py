"""The few ways in which results reach the disk so that a crash cannot leave half of one behind.

Each function is one step that either happened or did not; whoever writes something larger puts
them in order: write, sync the file, rename, sync the folder. Tests kill the process at each of
them. Not covered: several writers to one folder, file systems that lie about `fsync`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def make_folder(path: Path) -> None:
    """Make one new folder; raises FileExistsError where there is something already."""
    path.mkdir()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, not yet durable."""
    path.write_bytes(data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, not yet durable. Raises OSError as any other write does."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    try:
        save_file(ready, str(path), metadata=metadata)
    except SafetensorError as error:
        # safetensors hides the system's error number in its text; callers handle OSError only.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from error


def sync(path: Path) -> None:
    """Make a file's contents, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name in one step; an existing file there is replaced."""
    os.replace(old, new)


def remove(path: Path) -> None:
    """Remove a file, or a folder and all in it, file by file; a crash leaves the rest."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that a reader, also after a crash, finds the old one or the new one."""
    beside = path.with_name(path.name + ".part")
    write_bytes(beside, data)
    sync(beside)
    rename(beside, path)
    sync(path.parent)
