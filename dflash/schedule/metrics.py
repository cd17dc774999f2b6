"""The numbers of a run: one JSON line per event always, TensorBoard beside it if wanted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsLog:
    """Appends to ``metrics.jsonl``; a context manager.

    Every line has ``kind`` (``train``, ``held_out``, ``worker``, ``end``), ``step`` and ``time``.
    """

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        torn = not _ends_a_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        if torn:  # a killed run's last line must not swallow this one's first
            self._file.write("\n")
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"))
            except ImportError:
                self._board = None  # `dflash plan` says that it is not installed

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
                if self._board is not None:
                    self._board.close()
        except OSError:
            if error is None:  # else the run has failed, maybe of the same full disk: that is told
                raise

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Adds one line; numbers go to TensorBoard as ``kind/name``."""
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(f"{kind}/{name}", value, step)


def _ends_a_line(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:  # there is none, or it is empty
        return True


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run; what a killed one left of its last line is left out."""
    lines = []
    for text in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
