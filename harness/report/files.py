"""The report's files, below the folder of ``--race-report``.

``report.json`` has the run and its rows, ``index.html`` is the page made from it, and ``cases/``
has per case ``NAME.json``, the whole record, and ``NAME.trace.json``, its timeline as trace events.
``crashes/NAME/`` is the folder of a case that is not what it had to be (:mod:`harness.crash`).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.redact import Redactor
from harness.report.row import Row
from harness.report.trace_events import trace_events

SCHEMA = 1


def is_foreign(folder: Path) -> bool:
    """Whether somebody else's files stand where a report would remove or replace them."""
    names = ("cases", "crashes", "report.json", "index.html")
    if not any((folder / name).exists() for name in names):
        return False
    if any((folder / "cases").glob("*.trace.json")):
        return False
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not (isinstance(report, dict) and {"schema", "cases"} <= report.keys())


def clear(folder: Path) -> None:
    """Removes what an earlier run left, so that no stale case is taken for one of this run.

    Not for a foreign folder.
    """
    for name in ("cases", "crashes"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("report.json", "index.html"):
        (folder / name).unlink(missing_ok=True)


def write_case(folder: Path, name: str, record: Mapping[str, Any], row: Row) -> Row:
    """Writes ``cases/NAME.json`` and ``cases/NAME.trace.json``; returns the row with its file.

    The name is made safe for file systems, and for a second case of that name, a new one.
    Secrets are struck out as in a crash folder.
    """
    clean = Redactor(argv=sys.argv)
    record = clean.data(record)
    safe = "".join(c if c.isalnum() or c in "-_.[]" else "_" for c in name)
    path = _claim(folder / "cases", safe)
    row = Row.from_dict(clean.data(row.as_dict()) | {"file": path.name})
    write_json(path, {"schema": SCHEMA, "row": row.as_dict(), "record": record})
    write_json(trace_path(path), trace_events(record, row.case), indent=None)
    return row


def trace_path(case: Path) -> Path:
    """``NAME.trace.json`` beside ``NAME.json``."""
    return case.with_name(case.name.removesuffix(".json") + ".trace.json")


def crash_folder(folder: Path, row: Row) -> Path:
    """Where a case that has been written leaves its crash folder."""
    return folder / "crashes" / Path(row.file).stem


def _claim(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / f"{name[:120]}{f'-{number}' if number > 1 else ''}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:  # another test of this name, perhaps of another xdist worker
            continue
        return path
    raise AssertionError("unreachable")


def write_report(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> Path:
    """Writes ``report.json``: facts of the run, and its rows without their records."""
    path = folder / "report.json"
    write_json(path, {"schema": SCHEMA, **facts, "cases": [row.as_dict() for row in rows]})
    return path


def write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Writes it whole or not at all."""
    write_text(path, json.dumps(data, indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
