"""torch's own structured trace (TORCH_TRACE), joined with a log.

Read through tlparse where it is installed (its `raw.jsonl`), else directly: the lines that tell
when a frame's compile began and ended, in which function, and how it failed. A failure of the log
is joined with its compile by compile id, else by time, and with a thread by the frames that both
show (the trace has no thread names).

Not covered: graphs and generated code (tlparse's own report shows them), and compiles of backward,
which write no start.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.triage.collect import Collector, Group
from harness.triage.events import shorten
from harness.triage.reader import Block, Unreadable
from harness.triage.scan import Raw

TLPARSE_SECONDS = 300
# A failure is told a little after it happened, and clocks are written with seconds.
SLACK_SECONDS = 1.0

_HEAD = re.compile(r"^(?:\[rank\d+\]:)?[VIWEC](\d{4}) (\d\d:\d\d:\d\d\.\d+) +\d+ \S+\] (\{.*)$")
_WANTED = ('"dynamo_start"', '"compilation_metrics"', '"str"')
_OTHER_FORM = (ValueError, TypeError, AttributeError, KeyError)
_RANK = re.compile(r"_rank_(\d+)_")
_VERSION = re.compile(r'"pytorch_version": "([\d.]+)')
_STACK_LINE = re.compile(r"Line: (\d+), Name: ([^,]+), Filename: (.*)")


@dataclass
class Compile:
    """One compile of a frame.

    Attributes:
        id: ``0/1``: frame and how often it was compiled.
        function: where the compiled function stands.
        start, end: as the trace writes them (``1130 17:39:58.017000``), "" when unknown.
        stack: frames that led to it, outermost first (``file:line name``).
        fail_type, fail_reason: None when it did not fail.
        rank: of the file's name; each rank numbers its compiles from 0 on.
    """

    id: str
    function: str = ""
    start: str = ""
    end: str = ""
    stack: tuple[str, ...] = ()
    fail_type: str | None = None
    fail_reason: str | None = None
    rank: str | None = None

    @property
    def in_thread(self) -> bool:
        """Whether a thread other than the main one compiled."""
        return any("threading.py" in frame for frame in self.stack[:3])


@dataclass
class Trace:
    """What was read from the folder."""

    folder: str
    reader: str
    files: int = 0
    torch: str | None = None
    compiles: list[Compile] = field(default_factory=list)

    def to_json(self, failures: Sequence[Group]) -> dict[str, Any]:
        """Plain data, with the failures of the log that a compile belongs to or overlaps."""
        return {
            "folder": self.folder,
            "reader": self.reader,
            "files": self.files,
            "torch": self.torch,
            "compiles": [
                {
                    "id": one.id, "rank": one.rank, "function": one.function,
                    "start": one.start, "end": one.end,
                    "in_thread": one.in_thread, "stack": list(one.stack),
                    "fail_type": one.fail_type, "fail_reason": one.fail_reason,
                }
                for one in self.compiles
            ],
            "joined": [
                {"failure": index, **joined}
                for index, group in enumerate(failures)
                if (joined := self.join(group))
            ],
        }  # fmt: skip

    def join(self, group: Group) -> dict[str, Any]:
        """The compile of a failure, and the compiles of others that went on at that moment."""
        event = group.event
        possible = [
            one for one in self.compiles if None in (one.rank, event.rank) or one.rank == event.rank
        ]
        named = [one for one in possible if one.id == event.compile_id]
        own = named[0] if len(named) == 1 else None  # several processes have one of that id
        if own is None:
            own = next((one for one in named or possible if _same_failure(one, group)), None)
        said = {f"{frame.file}:{frame.line}" for frame in event.frames if not frame.of_torch}
        beside = [
            one for one in possible
            if one is not own and _within(event.time, one.start, one.end)
            and not (said and said & {frame.partition(" ")[0] for frame in one.stack})
        ]  # fmt: skip
        if own is None and not beside:
            return {}
        return {
            "compile": own.id if own else None,
            "beside": [f"{one.id} {one.function}" for one in beside],
        }


def read_trace(folder: Path, collector: Collector) -> Trace:
    """Reads a TORCH_TRACE folder (or one file of it); failures that the logs lack are added.

    Raises:
        Unreadable: no such folder, no trace in it, or one in another form.
    """
    files = sorted(folder.glob("*.log")) if folder.is_dir() else [folder]
    files = [path for path in files if path.is_file()]
    if not files:
        raise Unreadable(f"{folder}: no trace is in it; run the program with TORCH_TRACE={folder}")
    tlparse = shutil.which("tlparse")
    trace = Trace(str(folder), "tlparse" if tlparse else "direct", len(files))
    for path in files:
        try:
            compiles = _parsed(tlparse, path) if tlparse else []
            if not compiles:  # also of another version's output: read it ourselves
                trace.reader, compiles = "direct", _compiles(_direct(path))
            trace.torch = trace.torch or _version_in(path)
        except OSError as error:
            raise Unreadable(f"{path}: cannot be read ({error.strerror})") from error
        except _OTHER_FORM as error:
            raise Unreadable(f"{path}: is no trace of torch in a form that is known") from error
        rank = _RANK.search(path.name)
        for one in compiles:
            one.rank = rank[1] if rank else None
        trace.compiles += compiles
    if not trace.compiles and trace.torch is None:
        raise Unreadable(f"{folder}: no trace is in it; run the program with TORCH_TRACE={folder}")
    if trace.torch:
        collector.stated_torch[trace.torch] = None
    _add_failures(trace, collector)
    return trace


def _parsed(command: str, path: Path) -> list[Compile]:
    try:
        return _compiles(_through_tlparse(command, path))
    except _OTHER_FORM:
        return []


def _direct(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(time, record) of the lines that matter; payload lines begin with a tab."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line[:1] == "\t" or not any(word in line for word in _WANTED):
                continue
            found = _HEAD.match(line)
            if found is None:
                continue
            try:
                record = json.loads(found[3])
            except ValueError:
                continue  # cut off
            if isinstance(record, dict):
                yield f"{found[1]} {found[2]}", record


def _through_tlparse(command: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="harness-tlparse-") as out:
        try:
            done = subprocess.run(
                [command, str(path), "-o", f"{out}/parsed", "--overwrite", "--no-browser"],
                capture_output=True, timeout=TLPARSE_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return
        raw = Path(out, "parsed", "raw.jsonl")
        if done.returncode != 0 or not raw.is_file():
            return
        with raw.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if "string_table" in line[:20]:
                    names = json.loads(line)["string_table"]
                    for index, name in enumerate(names):
                        yield "", {"str": [name, index]}
                elif any(word in line for word in _WANTED):
                    record = json.loads(line)
                    yield _as_in_the_trace(record.get("timestamp", "")), record


def _as_in_the_trace(timestamp: str) -> str:
    """``2026-11-30T17:39:58.017000Z`` -> ``1130 17:39:58.017000``."""
    found = re.match(r"\d{4}-(\d\d)-(\d\d)T(\d\d:\d\d:\d\d\.\d+)", timestamp)
    return f"{found[1]}{found[2]} {found[3]}" if found else ""


def _compiles(records: Iterable[tuple[str, dict[str, Any]]]) -> list[Compile]:
    names: dict[int, str] = {}
    found: dict[str, Compile] = {}
    for time, record in records:
        if "str" in record:
            name, index = record["str"]
            names[index] = shorten(name)
        elif "dynamo_start" in record:
            one = found.setdefault(_id(record), Compile(_id(record)))
            one.start = one.start or time
            stack = record["dynamo_start"].get("stack") or []
            one.stack = tuple(
                f"{names.get(f.get('filename'), f.get('filename'))}:{f.get('line')} {f.get('name')}"
                for f in stack
            )
            one.function = one.function or (one.stack[-1] if one.stack else "")
        elif "compilation_metrics" in record:
            metrics = record["compilation_metrics"]
            name = metrics.get("compile_id") or _id(record)
            one = found.setdefault(name, Compile(name))
            one.end = time
            if metrics.get("co_name"):
                place = shorten(metrics.get("co_filename") or "")
                one.function = f"{place}:{metrics.get('co_firstlineno')} {metrics['co_name']}"
            one.fail_type, one.fail_reason = metrics.get("fail_type"), metrics.get("fail_reason")
            if not one.stack:
                parts = (_STACK_LINE.match(text) for text in metrics.get("stack_trace") or ())
                one.stack = tuple(f"{shorten(p[3])}:{p[1]} {p[2]}" for p in parts if p)
    return list(found.values())


def _id(record: dict[str, Any]) -> str:
    return f"{record.get('frame_id', '-')}/{record.get('frame_compile_id', '-')}"


def _version_in(path: Path) -> str | None:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for _, line in zip(range(2000), lines, strict=False):
            found = _VERSION.search(line)
            if found:
                return found[1]
    return None


def _add_failures(trace: Trace, collector: Collector) -> None:
    """A compile that failed, told as a log would, unless a log told it already."""
    groups = [group for group in collector.groups.values() if group is not None]
    for one in trace.compiles:
        if one.fail_type is None or any(_same_failure(one, group) for group in groups):
            continue
        text = f"{one.start} ERROR\nTraceback (most recent call last):\n"
        for frame in one.stack:
            place, _, name = frame.partition(" ")
            file, _, line = place.rpartition(":")
            text += f'  File "{file}", line {line}, in {name}\n'
        text += f"{one.fail_type}: {one.fail_reason}\n"
        block = Block(0, text.encode(), True)
        raws = [
            Raw(0, number, data, True) for number, data in enumerate(block.data.split(b"\n"), 1)
        ]
        collector.take(f"{trace.folder} compile {one.id}", raws)


def _same_failure(one: Compile, group: Group) -> bool:
    if one.fail_type is None:
        return False
    first = (one.fail_reason or "").partition("\n")[0].strip()
    kind = one.fail_type.rpartition(".")[2]
    return any(
        event.short_type == kind and event.message.strip().startswith(first[:120])
        for event in group.event.chain()
    )


def _within(time: str | None, start: str, end: str) -> bool:
    moment, first, last = _seconds(time), _seconds(start), _seconds(end)
    if moment is None or first is None or last is None:
        return False
    return first - SLACK_SECONDS <= moment <= last + SLACK_SECONDS


def _seconds(time: str | None) -> float | None:
    """Seconds since the day began: the year stands in no log of torch, the day not in all."""
    found = re.search(r"(\d\d):(\d\d):(\d\d)(?:[.,](\d+))?", time or "")
    if found is None:
        return None
    at = datetime(2000, 1, 1, int(found[1]) % 24, int(found[2]) % 60, int(found[3]) % 60)
    fraction = float(f"0.{found[4]}") if found[4] else 0.0
    return at.hour * 3600 + at.minute * 60 + at.second + fraction
