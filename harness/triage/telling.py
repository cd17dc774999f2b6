"""A short grep that leads a person to what was found: few literals, of this log alone.

The pattern of the search itself (`needles.py`) marks whatever could matter in any log and fills a
screen. Here stand the first words of each failure's message, its innermost frame of torch, and the
words of the lines by which a cause was told. Not covered: a message with colours inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.triage.collect import Group
from harness.triage.events import Event, Kind
from harness.triage.needles import escaped
from harness.triage.rules import Finding

ALTERNATIVES = 6
CHARACTERS = 48
_TOO_SHORT = 16  # for a message without its exception
_DUMPS = {"py-spy": r" \((idle|active)", "pystack": "Traceback for thread"}


def expression(failures: Sequence[Group], findings: Iterable[Finding]) -> str:
    """An extended regular expression, to stand in single quotes; "" where nothing was found."""
    wanted: dict[str, None] = {}
    if any(group.event.context.startswith("Exception in thread ") for group in failures):
        wanted["Exception in thread"] = None
    for group in failures:
        wanted.update(dict.fromkeys(_of_failure(group.event)))
    for finding in findings:
        for group in finding.evidence:
            wanted.update(dict.fromkeys(_of_evidence(group.event, finding.rule.literals)))
    kept = [text for text in wanted if not any(o != text and o in text for o in wanted)]
    return "|".join(kept[:ALTERNATIVES])


def _of_failure(event: Event) -> Iterator[str]:
    first = _words(event.message)
    if event.kind is Kind.FATAL:
        yield escaped(f"Fatal Python error: {event.type}"[:CHARACTERS])
    elif len(first) >= _TOO_SHORT:
        yield escaped(first)
    elif event.type:
        yield escaped(f"{event.short_type}: {first}" if first else event.short_type)
    frame = next((frame for frame in reversed(event.frames) if frame.of_torch), None)
    frame = frame or (event.frames[-1] if event.frames and not event.type else None)
    if frame is not None:  # as File "x.py", line 7 and as x.py:7
        yield f"{escaped('/'.join(frame.file.split('/')[-2:]))}[^0-9]{{1,9}}{frame.line}"


def _of_evidence(event: Event, literals: Sequence[str]) -> Iterator[str]:
    if event.kind is Kind.STACKS:
        yield _DUMPS.get(event.type, "most recent call first")
    elif event.kind in (Kind.NOTICE, Kind.ERROR):
        inside = [text for text in literals if text in event.message]
        yield escaped(max(inside, key=len) if inside else _words(event.message))


def _words(text: str) -> str:
    """The beginning of a message, cut at a word."""
    first = text.strip().partition("\n")[0]
    if len(first) > CHARACTERS:
        first = first[:CHARACTERS].rpartition(" ")[0] or first[:CHARACTERS]
    return first
