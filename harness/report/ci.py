"""What a CI service shows: a step summary, annotations on the tests' lines, JUnit properties.

Each only where it is asked for: the summary when ``GITHUB_STEP_SUMMARY`` names a file, annotations
when ``GITHUB_ACTIONS`` is ``true``, properties in whatever JUnit file pytest writes. Elsewhere the
terminal's plain table stands alone.

GitHub takes ten annotations of a kind from one step and refuses a summary above 1 MiB as a whole,
so both are cut here, failures first, and say so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.report.row import Row, grouped, worst
from harness.report.table import counts

MOST_ANNOTATIONS = 10
MOST_SUMMARY_BYTES = 200_000  # other steps of the job write into the same 1 MiB
_MOST_LINES = 20  # that say why, in one summary


def properties(row: Row) -> list[tuple[str, str]]:
    """JUnit properties of one case, as ``(name, value)``."""
    values = {
        "verdict": row.verdict,
        "kind": row.kind,
        "torch": row.torch,
        "frame": row.frame,
        "holder": row.holder,
        "seconds": f"{row.seconds:.3f}",
        "replay": row.replay,
    }
    return [(f"race_{name}", value) for name, value in values.items()]


# -- annotations ---------------------------------------------------------------------------------


def workflow_commands(
    rows: Sequence[Row], *, root: Path, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Workflow commands, one a line, for the cases that were not what they had to be.

    Args:
        root: what the tests' paths are relative to; GitHub wants them from the workspace on.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    bad = [worst(group) for group in grouped(rows) if not all(row.met for row in group)]
    bad.sort(key=lambda row: bool(row.known))  # errors before warnings
    workspace = environment.get("GITHUB_WORKSPACE", "")
    lines = [_annotation(row, root, workspace) for row in bad]
    if len(lines) > MOST_ANNOTATIONS:
        more = len(lines) - MOST_ANNOTATIONS + 1
        lines = lines[: MOST_ANNOTATIONS - 1]
        lines.append(
            _command("error", {"title": "compile races"}, f"{more} more cases: see the log")
        )
    return lines


def _annotation(row: Row, root: Path, workspace: str) -> str:
    file, _, line = row.test.rpartition(":")
    fields = {"title": f"{row.case}: {row.verdict}, expected {row.expected}"}
    if file and line.isdigit():
        fields = {"file": _from_workspace(root / file, workspace), "line": line} | fields
    says = [*row.unmet]
    if row.frame:
        says.append(f"raised by {row.frame}")
    if row.holder:
        says.append(f"state held by {row.holder}")
    if row.replay:
        says.append(f"again: {row.replay}")
    return _command("warning" if row.known else "error", fields, "\n".join(says))


def _from_workspace(path: Path, workspace: str) -> str:
    if workspace and path.is_relative_to(workspace):
        return path.relative_to(workspace).as_posix()
    return path.as_posix()


def _command(name: str, fields: Mapping[str, str], message: str) -> str:
    """One workflow command; ``%``, line ends and, in fields, ``:`` and ``,`` are escaped."""
    joined = ",".join(f"{key}={_field(value)}" for key, value in fields.items())
    return f"::{name} {joined}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# -- step summary --------------------------------------------------------------------------------


def write_summary(rows: Sequence[Row], environment: Mapping[str, str] = os.environ) -> Path | None:
    """Appends to the step summary; returns its path, or None where there is none to write."""
    name = environment.get("GITHUB_STEP_SUMMARY")
    if not name or not rows:
        return None
    path = Path(name)
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown(rows))
    return path


def markdown(rows: Sequence[Row]) -> str:
    """The run as Markdown: counts, what is not as expected with its reasons, then the table."""
    groups = sorted(grouped(rows), key=lambda group: all(row.met for row in group))
    bad = [worst(group) for group in groups if not all(row.met for row in group)]
    parts = ["### Compile races\n", "".join(f"* {_text(line)}\n" for line in counts(rows)), "\n"]
    for row in bad[:_MOST_LINES]:
        word = "Known" if row.known else "**Not as expected**"
        why = "; ".join(row.unmet)
        parts.append(f"{word}: {_code(row.case)}: {_text(why)}  \n")
        if row.replay:
            parts.append(f"again: {_code(row.replay)}\n\n")
    if len(bad) > _MOST_LINES:
        parts.append(f"... and {len(bad) - _MOST_LINES} more.\n")
    parts.append(f"\n<details><summary>{len(groups)} cases</summary>\n\n")
    head = ("case", "as expected", "verdict", "threads", "raised by", "state held by", "seconds")
    parts.append(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    end = "\n</details>\n\n"
    room = MOST_SUMMARY_BYTES - sum(len(part.encode()) for part in parts) - len(end) - 100
    for number, line in enumerate(_table_lines(groups)):
        room -= len(line.encode())
        if room < 0:
            parts.append(f"\n{len(groups) - number} more cases are left out here.\n")
            break
        parts.append(line)
    return "".join((*parts, end))


def _table_lines(groups: Sequence[Sequence[Row]]) -> Iterator[str]:
    for group in groups:
        row, met = worst(group), sum(run.met for run in group)
        yes = "yes" if met == len(group) else ("known" if row.known else "**NO**")
        if len(group) > 1:
            yes += f" {met}/{len(group)}"
        seconds = sum(run.seconds for run in group) / len(group)
        cells = (
            _code(row.case),
            yes,
            _text(row.verdict),
            f"{row.completed}/{row.threads}",
            _code(row.frame.rpartition("/")[2]),
            _text(row.holder),
            f"{seconds:.1f}",
        )
        yield f"| {' | '.join(cells)} |\n"


def _text(text: str) -> str:
    """Plain text in a Markdown table cell: no markup, no HTML, no cell border, one line."""
    escaped = re.sub(r"([\\`*_\[\]()#+!|~<>&@])", r"\\\1", " ".join(text.split()))
    return escaped.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def _code(text: str) -> str:
    """A code span: HTML's own, because backticks inside a table cannot hold a ``|``."""
    return f"<code>{_text(text)}</code>" if text else ""
