"""The report's files: ``report.json`` for the run, one JSON file with the whole record per case."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report.row import Row

SCHEMA = 1


def clear(folder: Path) -> None:
    """Removes what an earlier run left, so that no stale case is taken for one of this run."""
    shutil.rmtree(folder / "cases", ignore_errors=True)
    (folder / "report.json").unlink(missing_ok=True)


def write_case(folder: Path, name: str, record: Mapping[str, Any], row: Row) -> Path:
    """Writes ``cases/NAME.json``; the name is made safe for file systems."""
    safe = "".join(c if c.isalnum() or c in "-_.[]" else "_" for c in name)[:120]
    path = folder / "cases" / f"{safe}.json"
    _write(path, {"schema": SCHEMA, "row": row.as_dict(), "record": record})
    return path


def write_report(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> Path:
    """Writes ``report.json``: facts of the run, and its rows without their records."""
    path = folder / "report.json"
    _write(path, {"schema": SCHEMA, **facts, "cases": [row.as_dict() for row in rows]})
    return path


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(partial, path)
