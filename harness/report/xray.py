"""The x-ray as text for a terminal and as one HTML file; see :mod:`harness.xray`.

The HTML loads nothing from elsewhere. On a narrow screen the table scrolls sideways beside its
first column; each cell says in words what its sign means.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.xray import Cell, Look, XRay

SIGNS = {
    Look.REST: ("·", "at rest for the other thread"),
    Look.SEEN: ("●", "the other thread sees it not at rest"),
    Look.OWN: ("o", "only the thread itself sees it"),
    Look.GREW: ("+", "a cache or counter of all threads has changed"),
    Look.UNKNOWN: ("?", "unknown: this torch does not have it, or the stage was not reached"),
}
STAYS = ("!", "still not at rest after the thread has ended")
_COLORS = {Look.SEEN: "red", Look.OWN: "cyan", Look.GREW: "yellow", Look.UNKNOWN: "magenta"}


def headline(found: XRay) -> str:
    """One line: what this torch is, and how much of it leaks."""
    leaks = found.leaks()
    without = f" without {', '.join(found.unfix)}" if found.unfix else ""
    return (
        f"torch {found.torch}{without}, Python {found.python}: another thread sees "
        f"{len(leaks)} states not at rest, at {len(found.columns)} stages"
    )


def render(found: XRay, *, width: int, color: bool) -> str:
    """The table, ``width`` columns wide: a column per stage, numbered, explained below."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, emoji=False)
    console.print(escape(headline(found)), style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("probe", no_wrap=True)
    for number in range(1, len(found.columns) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    for probe, cells in found.rows():
        table.add_row(probe.name, *(_sign(cell) for cell in cells))
    console.print(table)
    for number, column in enumerate(found.columns, 1):
        lacks = f" ({column.absent})" if column.absent else ""
        console.print(escape(f"{number:>2} {column.stage}: {column.what}{lacks}"))
    for sign, what in (*SIGNS.values(), STAYS):
        console.print(escape(f" {sign} {what}"))
    console.print(escape(f"at rest at every stage: {', '.join(found.quiet())}"))
    for line in findings(found):
        console.print(escape(line), style="red")
    return out.getvalue()


def findings(found: XRay) -> list[str]:
    """What makes the x-ray a finding: states that stay, stages that were not reached."""
    return [
        *(f"sticky: {line}" for line in found.sticky()),
        *(f"not seen: {line}" for line in found.problems()),
    ]


def write_html(found: XRay, path: Path) -> None:
    """Writes the page.

    Raises:
        OSError: the file cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template("xray.html").render(
        found=found,
        headline=headline(found),
        findings=findings(found),
        signs={look.value: {"sign": sign, "what": what} for look, (sign, what) in SIGNS.items()},
        stays={"sign": STAYS[0], "what": STAYS[1]},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _sign(cell: Cell) -> str:
    sign = SIGNS[cell.look][0] + (STAYS[0] if cell.stays else "")
    color = "red" if cell.stays else _COLORS.get(cell.look)
    return f"[{color}]{sign}[/{color}]" if color else sign
