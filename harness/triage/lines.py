"""One line of a log, freed of what loggers, launchers and terminals put round it.

Covered: ANSI colours, rank prefixes (``[rank0]:``, ``[1]:``, ``0: ``, ``[default0]:``), Ray's and
vLLM's process prefixes, compose's ``name | ``, containers' ``stderr F``, syslog, time stamps,
levels, thread names, torch's and c10's logging prefixes with compile ids, ``grep -n`` output. A
prefix is taken off only at the beginning of a line, so text inside a message stays.

One JSON object per line: see `records.py`. Other encodings: see `reader.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.triage.events import Place

# Nothing that a diagnosis needs stands further right; a line may be gigabytes long.
LINE_CHARACTERS = 4096
_PREFIXES_AT_MOST = 8

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
# Of what is left, nothing may reach somebody's terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_PREFIX = re.compile(
    r"""
      \[(?:[Rr]ank|default|trainer|worker|local_rank)[ _-]?(?P<rank>\d{1,6})\]:?[ ]?
    | \[(?P<rank2>\d{1,5})\]:[ ]?
    | (?P<rank3>\d{1,5}):[ ](?=[\sA-Za-z\[|+~^])
    | \((?P<actor>[A-Za-z_][\w.<>-]{0,60}(?:[ ][\w.=-]{1,40}){0,4}[ ]pid=\d+[^)\n]{0,80})\)[ ]?
    | (?P<torch>(?P<tl>[VDIWECF])(?P<td>\d{4})[ ](?P<tt>\d\d:\d\d:\d\d\.\d+)[ ]+(?P<tid>\d+)
        [ ](?P<tfile>[^\s\]]{1,200}):(?P<tline>\d+)\][ ]?
        (?:\[(?P<cid>(?:!\d+/)?(?:\d+|-)/[\d_-]+|-)\][ ]?)?(?:\[__(?P<artifact>\w{1,40})\][ ]?)?)
    | \[(?P<cl>[IWEF])(?P<cd>\d{3,4})[ ](?P<ct>\d\d:\d\d:\d\d\.\d+)
        [ ](?P<cfile>[\w./-]{1,100}:\d+)\][ ]?
    | \[?(?P<time>(?:\d{4}[-/])?\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?
        (?:Z|[+-]\d\d:?\d\d)?)\]?(?:[ ]?[,|:-](?=[ ]))?[ ]?
    | \[?(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)\]?(?:[ ]?[,|:-](?=[ ]))?[ ]?
    | (?P<syslog>[A-Z][a-z]{2}[ ][ \d]\d[ ]\d\d:\d\d:\d\d)[ ]\S{1,80}[ ](?P<unit>[\w./@-]{1,60})
        (?:\[\d+\])?:[ ]?
    | (?P<basic>DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]{1,80}:[ ]?
    | \[?(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|TRACE|NOTICE)\]?
        (?:[ ]{0,10}[:|-]+)?(?=\s|$)[ ]?
    | (?P<worker>MainThread|[A-Za-z][\w.]{0,40}(?:-\d+){1,3}(?:_\d+)?)[ ]?[|:-]?[ ]
        (?=\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b)
    | [\w.-]{1,80}[ ]?[|:-]?[ ](?=\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?[ ]{0,9}[:|-])
    | (?P<cri>std(?:out|err)[ ][FP][ ])
    | (?P<service>[A-Za-z][\w.-]{0,60})[ ]{1,20}\|[ ](?=\S|\ )
    | [\[(<](?P<thread>MainThread|Thread-\d+(?:[ ]\([^)\n]{1,80}\))?
        |[A-Za-z][\w.]{0,40}(?:-\d+){1,3}(?:_\d+)?)[\])>]:?[ ]?
    | (?P<bare>[A-Za-z]\w{0,40}-\d{1,4}(?:_\d+)?)(?::|[ ]\|)[ ](?=\S)
    | (?:[\w./-]{1,200}\.(?:log|txt|out|err)[:-])?(?:\d{1,10}[:-])(?=\s*(?:File[ ]"|Traceback[ ]))
    | (?:[\w./-]{1,200}\.(?:log|txt|out|err))[:](?=\s*(?:File[ ]"|Traceback[ ]))
    """,
    re.X,
)


@dataclass(slots=True)
class Line:
    """One line.

    Attributes:
        offset, number: of its first byte in the input, and the line's number from 1.
        text: what is left without prefixes; indentation stays, one space after a prefix goes.
        rank, thread, time, level: as the prefixes say, else None.
        compile_id, artifact: of torch's logging prefix (``0/3``, ``graph_code``).
        whole: the line without colours, cut to :data:`LINE_CHARACTERS`.
    """

    offset: int
    text: str
    rank: str | None = None
    thread: str | None = None
    time: str | None = None
    level: str | None = None
    compile_id: str | None = None
    artifact: str | None = None
    source: str | None = None
    whole: str = ""
    number: int | None = None

    def place(self, name: str) -> Place:
        """Where it stands in the input called ``name``."""
        return Place(name, self.offset, self.number)

    @property
    def key(self) -> str:
        """Which stream of lines it belongs to."""
        return f"{self.rank or ''}/{self.thread or ''}"


_LEVELS = {
    "V": "DEBUG", "D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "C": "CRITICAL",
    "F": "CRITICAL",
}  # fmt: skip


def parse_line(raw: bytes, offset: int = 0, number: int | None = None) -> Line:
    """Reads one line (without its line end)."""
    text = raw[:LINE_CHARACTERS].decode("utf-8", "replace")
    if not text.isprintable():
        text = _CONTROL.sub("", _ANSI.sub("", text))
    line = Line(offset, text, whole=text, number=number)
    at = 0
    for _ in range(_PREFIXES_AT_MOST):
        found = _PREFIX.match(text, at)
        if found is None or found.end() == at:
            break
        _take(line, found)
        at = found.end()
    line.text = text[at:].rstrip()
    return line


def _take(line: Line, found: re.Match[str]) -> None:
    group = found.group
    match found.lastgroup:
        case "rank" | "rank2" | "rank3":
            line.rank = group("rank") or group("rank2") or group("rank3")
        case "actor":
            line.rank = line.rank or group("actor")
        case "service":
            line.rank = line.rank or group("service")
        case "torch":
            line.time = line.time or f"{group('td')} {group('tt')}"
            line.level = _LEVELS[group("tl")]
            line.compile_id, line.artifact = group("cid"), group("artifact")
            line.source = f"{group('tfile')}:{group('tline')}"
        case "cfile":
            line.time = line.time or f"{group('cd')} {group('ct')}"
            line.level = _LEVELS[group("cl")]
            line.source = group("cfile")
        case "time" | "clock":
            line.time = line.time or group("time") or group("clock")
        case "unit":
            line.time = line.time or group("syslog")
        case "level" | "basic":
            level = group("level") or group("basic")
            line.level = "WARNING" if level == "WARN" else level
        case "thread" | "bare" | "worker":
            line.thread = group("thread") or group("bare") or group("worker")
        case _:
            pass
