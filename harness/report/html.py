"""``index.html``: the verdicts of a run, and for each case its timeline, stacks and replay line.

One file with everything in it: it loads nothing and sends nothing (its content policy forbids
both), so it can be kept as an artifact and opened from a disk. Everything that comes from a record
goes through the template engine's escaping. Repeats of a case are one entry, which shows the first
run that was not as expected.

Not covered: runs with more than :data:`MOST_SECTIONS` different cases; the rest is in the table
only, and says so.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.capture import RAISED, shorten
from harness.report.files import trace_path, write_text
from harness.report.lanes import STAGES, Failure, Lane, Sighting, Span, Timeline, timeline
from harness.report.row import DANGERS, Row, grouped, worst

MOST_SECTIONS = 300
MOST_SPANS = 1500  # drawn per case, the longest first; the trace file has all of them
_TEMPLATES = Path(__file__).with_name("templates")
_MOST_PROBES = 6  # lanes before the rest is folded
_APART = 30  # percent of the width that a label needs
_ALWAYS_SHOWN = 3  # innermost frames of a stack that are never folded


@dataclass(frozen=True)
class Frames:
    """Neighbouring frames of a stack; what is only torch's way there is folded."""

    folded: bool
    frames: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Panel:
    """One stack under its heading."""

    title: str
    note: str
    stack: tuple[Frames, ...]


@dataclass(frozen=True)
class Trouble:
    """A victim's stack and, where it is known, that of the thread which held the state."""

    victim: Panel
    holder: Panel | None


@dataclass(frozen=True)
class Drawing:
    """A timeline with the lanes that are really drawn, and what was left out."""

    timeline: Timeline
    lanes: tuple[Lane, ...]
    not_drawn: int

    @property
    def probes(self) -> list[tuple[str, tuple[Sighting, ...]]]:
        """The state that a holder is blamed for first, then by name."""
        blamed = {failure.state for failure in self.timeline.failures}
        return sorted(self.timeline.probes.items(), key=lambda item: (item[0] not in blamed, item))


@dataclass(frozen=True)
class Entry:
    """A case of the table, and its section."""

    id: str
    row: Row
    runs: int
    met: int
    record: Mapping[str, Any] = field(default_factory=dict)
    drawing: Drawing | None = None
    troubles: tuple[Trouble, ...] = ()
    record_link: str = ""
    trace_link: str = ""
    crash_folder: str = ""
    others: tuple[tuple[str, str], ...] = ()  # text and link of further runs that were not met

    @property
    def status(self) -> str:
        """``as expected``, ``known`` or ``not as expected``."""
        if self.met == self.runs:
            return "as expected"
        return "known" if self.row.known else "not as expected"


def write_index(folder: Path) -> Path:
    """Makes ``index.html`` of a folder's ``report.json`` and ``cases/``; returns its path.

    Raises:
        OSError, ValueError, KeyError, TypeError: ``report.json`` is missing or is not a report.
    """
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rows = [Row.from_dict(row) for row in report["cases"]]
    path = folder / "index.html"
    write_text(path, render(rows, report, folder))
    return path


def render(rows: Sequence[Row], facts: Mapping[str, Any], folder: Path) -> str:
    """The page as text; records are read from ``folder/cases``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = shorten
    environment.globals |= {
        "percent": _percent,
        "width": _width,
        "moments": _moments,
        "unfixed": _unfixed,
        "most_probes": _MOST_PROBES,
        "stages": STAGES,
        "lane_rows": _lane_rows,
    }
    entries = _entries(rows, folder)
    return environment.get_template("race.html").render(
        facts=facts,
        entries=entries,
        dangers=DANGERS,
        dangers_columns=[(name, "later n", True) for name in DANGERS],
        torch=", ".join(sorted({row.torch for row in rows if row.torch})) or "unknown",
        raised_here=RAISED,
        kinds=list(dict.fromkeys(entry.row.kind for entry in entries)),
        most=MOST_SECTIONS,
    )


def _entries(rows: Sequence[Row], folder: Path) -> list[Entry]:
    groups = grouped(rows)
    # What is not as expected comes first, then the order of the terminal's table.
    groups.sort(key=lambda group: (all(row.met for row in group), group[0].kind, group[0].case))
    return [_entry(index, group, folder) for index, group in enumerate(groups)]


def _entry(index: int, group: Sequence[Row], folder: Path) -> Entry:
    row = worst(group)
    entry = Entry(f"case-{index}", row, len(group), sum(r.met for r in group))
    if index >= MOST_SECTIONS:
        return entry
    record = _record(folder, row)
    return replace(
        entry,
        record=record,
        drawing=_drawing(record),
        troubles=tuple(_troubles(record)),
        record_link=_link(folder, Path(row.file)),
        trace_link=_link(folder, trace_path(Path(row.file or "none.json"))),
        crash_folder=_crash_folder(folder, row),
        others=tuple(
            (r.file.removesuffix(".json"), _link(folder, Path(r.file)))
            for r in group
            if not r.met and r is not row
        ),
    )


def _record(folder: Path, row: Row) -> Mapping[str, Any]:
    """The whole record; empty when the file is gone or torn: the table still stands."""
    if not row.file:
        return {}
    try:
        record: Mapping[str, Any] = json.loads(
            (folder / "cases" / Path(row.file).name).read_text(encoding="utf-8")
        )["record"]
    except (OSError, ValueError, KeyError):
        return {}
    return record


def _link(folder: Path, name: Path) -> str:
    exists = name.name and (folder / "cases" / name.name).is_file()
    return f"cases/{quote(name.name)}" if exists else ""


def _crash_folder(folder: Path, row: Row) -> str:
    """Its crash folder as a shell takes it, where one was left."""
    path = folder / "crashes" / Path(row.file).stem
    return shlex.quote(str(path)) if row.file and path.is_dir() else ""


def _drawing(record: Mapping[str, Any]) -> Drawing | None:
    drawn = timeline(record)
    if drawn is None:
        return None
    spans = [span for lane in drawn.lanes for span in lane.spans]
    if len(spans) <= MOST_SPANS:
        return Drawing(drawn, drawn.lanes, 0)
    longest = sorted(spans, key=lambda span: span.begin - span.end)[:MOST_SPANS]
    kept = {id(span) for span in longest}

    def thinned(spans: Sequence[Span]) -> tuple[Span, ...]:
        return tuple(span for span in spans if id(span) in kept)

    lanes = tuple(Lane(lane.thread, thinned(lane.spans)) for lane in drawn.lanes)
    return Drawing(drawn, lanes, len(spans) - MOST_SPANS)


def _troubles(record: Mapping[str, Any]) -> Iterator[Trouble]:
    watch = record.get("watch", {})
    for outcome in record.get("outcomes", ()):
        thread, error = outcome["thread"], outcome.get("error")
        held = watch.get("holders", {}).get(thread)
        holder = None
        if held is not None:
            holder = Panel(
                f"{held['thread']} held {held['state']}",
                "where it was at that moment",
                _folded(held.get("stack", ())),
            )
        if outcome["state"] == "raised" and error:
            message = next(iter(error["message"].splitlines()), "")
            title = f"{thread} raised {error['type'].rpartition('.')[2]}"
            yield Trouble(Panel(title, message, _folded(error["frames"])), holder)
        elif outcome["state"] == "unfinished":
            owner = watch.get("lock_owner")
            note = f"the compile lock was held by {owner}" if owner else ""
            title = f"{thread} had not ended at the deadline"
            yield Trouble(Panel(title, note, _folded(outcome["stack"])), holder)


def _folded(stack: Sequence[Mapping[str, Any]]) -> tuple[Frames, ...]:
    last = len(stack) - _ALWAYS_SHOWN

    def hidden(numbered: tuple[int, Mapping[str, Any]]) -> bool:
        index, frame = numbered
        inside = "-packages/torch/" in frame["file"] or "/threading.py" in frame["file"]
        return index < last and inside and not frame.get("central")

    return tuple(
        Frames(folded, tuple(frame for _, frame in frames))
        for folded, frames in groupby(enumerate(stack), key=hidden)
    )


def _percent(at: float, drawn: Timeline) -> float:
    """Where a moment is on the page, in percent of the timeline's width."""
    return round(100 * (at - drawn.begin) / drawn.seconds, 4)


def _width(span: Span, drawn: Timeline) -> float:
    return round(100 * (span.end - span.begin) / drawn.seconds, 4)


def _lane_rows(lane: Lane) -> int:
    """Rows that a lane needs: most threads beside the crew need one or two."""
    return max((STAGES[span.stage].row + 1 for span in lane.spans), default=1)


def _moments(drawn: Timeline) -> list[tuple[float, str]]:
    """Labels of the failures; those too near to each other to be read apart become one."""
    groups: list[list[Failure]] = []
    for failure in sorted(drawn.failures, key=lambda failure: failure.at):
        if groups and _percent(failure.at, drawn) - _percent(groups[-1][0].at, drawn) < _APART:
            groups[-1].append(failure)
        else:
            groups.append([failure])
    labels = []
    for group in groups:
        held = dict.fromkeys(f"{f.holder} held {f.state}" for f in group if f.holder)
        says = "; ".join([f"{', '.join(f.thread for f in group)} failed", *held])
        labels.append((_percent(group[0].at, drawn), says))
    return labels


def _unfixed(names: Any) -> str:
    """The repairs that were taken out; a record maps each to whether this torch had it."""
    if isinstance(names, Mapping):
        return ", ".join(
            name if done else f"{name} (not in this torch)" for name, done in names.items()
        )
    return ", ".join(names)
