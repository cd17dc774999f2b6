"""Logs of one JSON object per line: what such a line holds, as the lines it stands for.

Also a traceback inside the repr of an exception, whose line ends are written out.

The object is not parsed: a long one may be cut. Level, time, thread and rank are taken out of it,
and a traceback inside a string becomes lines again.

Not covered: other structured forms (logfmt, CBOR), and nested objects with the same keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from harness.triage.lines import Line
from harness.triage.words import of_others

_FIELD = re.compile(
    r'"(level|levelname|severity|time|ts|timestamp|asctime|@timestamp|thread|threadName|thread_name'
    r'|rank|local_rank)"\s?:\s?"?([^",}]{1,80})'
)
_TEXT = re.compile(
    r'"(?:msg|message|event|log|exc_info|exception|traceback|stack|stack_trace|exc_text|error)"'
    r'\s?:\s?"'
)
# A traceback in the repr of an exception: one line, its line ends written out.
_QUOTED = "Traceback (most recent call last):\\n"
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "ERR": "ERROR"}
_THREADS = ("thread", "threadName", "thread_name")
LINES_AT_MOST = 400


def expand(line: Line) -> Iterator[Line]:
    """The lines that a JSON record stands for; any other line as it is."""
    text = line.text
    found = dict(_FIELD.findall(text)) if text.startswith("{") and '":' in text else {}
    starts = [match.end() for match in _TEXT.finditer(text)] if found else []
    if not starts:
        yield from _of_a_repr(line) if _QUOTED in text else [line]
        return
    level = next((found[key] for key in ("level", "levelname", "severity") if key in found), None)
    level = level.upper() if level else line.level
    times = ("time", "timestamp", "@timestamp", "asctime", "ts")
    base = replace(
        line,
        level=_LEVELS.get(level, level) if level else None,
        time=line.time or next((found[key] for key in times if key in found), None),
        thread=line.thread
        or next(
            (found[key] for key in ("thread", "threadName", "thread_name") if key in found), None
        ),
        rank=line.rank or found.get("rank") or found.get("local_rank"),
    )
    count = 0
    for start in starts:
        for piece in _string_at(text, start).split("\n"):
            count += 1
            if count > LINES_AT_MOST:
                return
            yield replace(base, text=piece.rstrip(), whole=piece)
            base = replace(base, level=None, time=None) if count == 1 else base


def _of_a_repr(line: Line) -> Iterator[Line]:
    before, header, behind = line.text.partition(_QUOTED)
    if of_others(before):
        yield replace(line, text=of_others(before))
        return
    first, *more = f"{before}{header}{behind}".split("\\n")[:LINES_AT_MOST]
    yield replace(line, text=first.rstrip())
    for piece in more:
        text = re.sub(r"['\"]\)*$", "", piece.rstrip()) if piece is more[-1] else piece.rstrip()
        yield replace(line, text=text, whole=text, level=None, time=None)


def _string_at(text: str, start: int) -> str:
    """The JSON string that begins at ``start``, with its escapes resolved; it may be cut off."""
    out, at = [], start
    plain = {"n": "\n", "t": "\t", "r": ""}
    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and at + 1 < len(text):
            at += 1
            out.append(plain.get(text[at], text[at]))
        else:
            out.append(text[at])
        at += 1
    return "".join(out)
