"""The terminal table of a run, one line a case; repeats of a case are one line with a rate."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.report.row import DANGERS, Row, grouped, worst

WIDE = 172  # columns in which no cell has to be folded
NARROW = 120  # in fewer, the details would leave the names no room
COLUMNS = ("threads", "verdict", "expected", "raised by", "state held by")
NUMBERS = (*DANGERS, "seconds")  # how often another thread's state was met, and how long it took


def render(rows: Sequence[Row], *, width: int, color: bool) -> str:
    """The table as text, ``width`` columns wide; a narrow one leaves the details out."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    longest = max((len(row.case) for row in rows), default=0)
    table.add_column("case", overflow="fold", min_width=min(longest, max(width // 2, 24)))
    for name in COLUMNS if width >= NARROW else COLUMNS[:3]:
        justify: Literal["left", "right"] = "right" if name == "threads" else "left"
        table.add_column(name, no_wrap=width >= WIDE, overflow="fold", justify=justify)
    for name in NUMBERS if width >= NARROW else ():
        table.add_column(name, no_wrap=True, justify="right", min_width=len(name))
    for group in grouped(sorted(rows, key=lambda row: (row.kind, row.case))):
        table.add_row(*_cells(group)[: len(table.columns)])
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, emoji=False)
    console.print(table)
    return out.getvalue()


def counts(rows: Sequence[Row]) -> list[str]:
    """A line per kind: how many are what they had to be."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        met = sum(row.met for row in of_kind)
        done = {"control": "caught", "guarded": "completed", "repaired": "completed"}.get(
            kind, "as expected"
        )
        lines.append(f"{kind}: {met} of {len(of_kind)} {done}")
    return lines


def summary(rows: Sequence[Row]) -> list[str]:
    """The counts, then a line per case that is not what it had to be."""
    lines = counts(rows)
    for row in rows:
        if not row.met:
            excuse = f" [known: {row.known}]" if row.known else ""
            lines.append(f"{row.case}: {'; '.join(row.unmet)}{excuse}")
    return lines


def _cells(group: Sequence[Row]) -> list[str]:
    row = worst(group)
    met = sum(run.met for run in group)
    if len(group) > 1:
        verdict = f"{met}/{len(group)}"
    else:
        verdict = "yes" if row.met else ("known" if row.known else "NO")
    color = "green" if met == len(group) else ("yellow" if row.known else "red")
    return [
        escape(row.case),
        f"{row.completed}/{row.threads}",
        row.verdict,
        f"[{color}]{verdict}[/{color}]",
        escape(row.frame.rpartition("/")[2]),
        escape(row.holder),
        *(str(row.exposures.get(kind, 0)) for kind in DANGERS),
        f"{sum(run.seconds for run in group) / len(group):.1f}",
    ]
