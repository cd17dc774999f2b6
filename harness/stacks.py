"""The stacks of all threads of this process: Python always, C where py-spy is at hand.

For a thread that does not end: where it stands says what it waits for. py-spy stops the process
for some milliseconds while it looks; it needs the right to trace, which containers often refuse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from harness.capture import stack_of

_LIMIT = 20.0  # seconds for py-spy


def python_stacks() -> dict[str, list[Mapping[str, Any]]]:
    """Thread name -> its frames as plain data, outermost first; the calling thread too.

    A name that several threads have is followed by the thread's number.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for ident, top in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        name = f"{name} ({ident})" if name in found else name
        found[name] = [asdict(frame) for frame in stack_of(top)]
    return found


def native_stacks() -> str:
    """What ``py-spy dump --native`` says, or one line that says why there is nothing."""
    program = shutil.which("py-spy")
    if program is None:
        return "no C stacks: py-spy is not installed"
    command = [program, "dump", "--native", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no C stacks: py-spy failed: {error}"
    if done.returncode != 0:
        first = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        return f"no C stacks: py-spy failed: {first}"
    return done.stdout
