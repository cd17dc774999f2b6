"""The folder that a failure leaves: everything that one wants to know afterwards, and no secrets.

=================  ==============================================================================
``crash.json``     the failure: threads, exceptions, culprits, probes, schedule, versions, command
``stacks.txt``     victim and holder of the state at that moment, then every other thread
``timeline.json``  the last events, who was inside what and when, probes that were not at rest
``environment.json``  allow-listed switches, versions of packages, platform
``README.txt``     what is in the folder and what to run next
=================  ==============================================================================

``crash.json`` is written last and every file in one piece: a folder that has it is whole. Its
schema is described in ``docs/run.md``; ``schema`` is raised when a field changes its meaning.

It imports no torch: versions are those of what the process has imported, or has installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import redact

SCHEMA = 1
FILES = ("stacks.txt", "timeline.json", "environment.json", "README.txt", "crash.json")
_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "accelerate",
    "lightning",
    "dflash-trainer",
)

_README = """\
A failure of a program whose threads call torch.compile, written by `harness {version}` at {when}.

    harness explain {folder}

says who died, of what, and who held the state. The files:

crash.json        the failure: threads, exceptions, culprits, probes, schedule, versions
stacks.txt        the stacks of the victim and of the thread that held the state, then the others
timeline.json     the last events of each thread; who was inside what, and when
environment.json  switches that change how torch compiles, versions, platform

Environment variables are allow-listed and secrets on the command line are masked. Stacks show
lines of your source and messages show your values: look before you publish them.
"""


def versions() -> dict[str, str]:
    """Python, and the packages that matter where they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        loaded = getattr(sys.modules.get(name), "__version__", None)
        try:
            found[name] = str(loaded or importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """The content of ``environment.json``."""
    return {
        "schema": SCHEMA,
        "switches": redact.environment(),
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def write_folder(
    folder: Path,
    crash: Mapping[str, Any],
    *,
    timeline: Mapping[str, Any],
    stacks: Mapping[str, Sequence[Mapping[str, Any]]] | str = "",
    argv: Iterable[str] = (),
) -> str | None:
    """Writes the five files; returns None, or in one line why it could not.

    Never raises: it runs while a program dies of something else, which must stay in sight.

    Args:
        folder: is made; files of an earlier failure in it are replaced.
        crash: the content of ``crash.json`` without ``schema``, ``written`` and ``versions``.
        timeline: the content of ``timeline.json`` without ``schema``.
        stacks: of the other threads at that moment, frames as plain data; or text as it is.
        argv: the program's command line; secrets in it are masked.
    """
    try:
        argv = list(argv)
        clean = redact.Redactor(argv=argv)
        surroundings = environment()
        whole = clean.data(
            {
                "schema": SCHEMA,
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "versions": surroundings["versions"],
                **crash,
                "argv": redact.arguments(argv),
            }
        )
        readme = _README.format(
            version=whole.get("harness", ""), when=whole["written"], folder=shlex.quote(str(folder))
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "crash.json").unlink(missing_ok=True)  # not whole from here on
        _write(folder / "stacks.txt", clean.text("\n".join(_stack_lines(crash, stacks))) + "\n")
        _write_json(folder / "timeline.json", clean.data({"schema": SCHEMA, **timeline}))
        _write_json(folder / "environment.json", clean.data(surroundings))
        _write(folder / "README.txt", readme)
        _write_json(folder / "crash.json", whole)
    except Exception as error:
        return f"the report cannot be written to {folder}: {type(error).__name__}: {error}"
    return None


def is_foreign(folder: Path) -> bool:
    """Whether ``folder`` holds somebody else's files, which a report might replace.

    A folder is ours when there is no other file in it, or when its ``crash.json`` is ours.
    """
    if not folder.is_dir():
        return False
    begun = (folder / FILES[0]).exists()  # the file that is written first
    ours = FILES if begun else ()
    others = [
        path
        for path in folder.iterdir()
        if path.name not in ours and not _is_partial(path) and not _is_process(path)
    ]
    return bool(others) and not _is_report(folder / "crash.json")


def clear(folder: Path) -> None:
    """Removes an earlier failure's files from ``folder`` and its ``process-*`` folders.

    Nothing else is touched; a folder that is empty then goes too. Not for a foreign folder.
    """
    for place in (*filter(_is_process, folder.glob("process-*")), folder):
        for path in (*map(place.joinpath, FILES), *filter(_is_partial, place.glob("*.part"))):
            path.unlink(missing_ok=True)
        if place.is_dir() and not any(place.iterdir()):
            with contextlib.suppress(OSError):  # the working folder, a mount point
                place.rmdir()


def _is_process(path: Path) -> bool:
    return path.is_dir() and path.name.removeprefix("process-").isdigit()


def _is_partial(path: Path) -> bool:
    """Whether it was left by a process that was killed while it wrote."""
    name, _, process = path.name.removesuffix(".part").rpartition(".")
    return path.suffix == ".part" and name in FILES and process.isdigit()


def _is_report(path: Path) -> bool:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"schema", "failures", "origin"} <= data.keys()


def from_record(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``crash`` and ``timeline`` for :func:`write_folder` from a trial's record.

    Args:
        record: of :meth:`harness.trial.Trial.record`, or of a case that died.
    """
    watch = record.get("watch", {})
    events = watch.get("timeline", [])
    holders = watch.get("holders", {})
    failures, threads = [], []
    for outcome in record.get("outcomes", ()):
        name, error = outcome["thread"], outcome.get("error")
        threads.append(
            {
                "thread": name,
                "outcome": "still running"
                if outcome["state"] == "unfinished"
                else outcome["state"],
                "steps": outcome.get("steps", 0),
                "stack": outcome.get("stack", []),
            }
        )
        if outcome["state"] == "raised" and error is not None:
            failures.append(_failure(name, error, holders.get(name), events))
    stuck = [row for row in record.get("probes", ()) if row["at_rest"] is False]
    crash = {
        "origin": "case",
        "process": record.get("process", {}),
        "unfix": record.get("unfix", {}),
        "failures": failures,
        "threads": threads,
        "stuck": [{k: row[k] for k in ("probe", "where", "rest", "value")} for row in stuck],
        "canaries": {name: what for name, what in record.get("canaries", {}).items() if what},
        "counts": {k: v for k, v in watch.items() if k in ("entries", "traces", "exposures")},
        "schedule": record.get("script") or {},
        "facts": record.get("notes", {}),
    }
    if "torch" in record:  # the case's own, whatever this process has
        crash["versions"] = {"python": record.get("python", ""), "torch": record["torch"]}
    return crash, {"events": events, "dropped": watch.get("timeline_dropped", 0), "spans": []}


def write_case(folder: Path, record: Mapping[str, Any], *, dump: str = "") -> str | None:
    """:func:`write_folder` for a case of a test run.

    Args:
        folder: of this case alone.
        record: what the case returned, or what became of its process.
        dump: the fault handler's stacks, if the process left any.
    """
    from harness import __version__

    told, timeline = from_record(record)
    return write_folder(
        folder, {"harness": __version__, **told}, timeline=timeline, stacks=dump, argv=sys.argv
    )


def _failure(
    thread: str,
    error: Mapping[str, Any],
    holder: Mapping[str, Any] | None,
    events: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    entered = _last(events, thread, "call.enter")
    ended = _last(events, thread, "call.exit")
    culprit = None
    if holder is not None:
        begin, left = _INSIDE.get(holder["state"], ("trace.begin", "trace.left"))
        start, end = _span(events, holder["thread"], begin, left, ended)
        culprit = {
            "thread": holder["thread"],
            "state": holder["state"],
            "how": "inside",
            "span": {
                "thread": holder["thread"],
                "kind": begin.partition(".")[0],
                "start": start,
                "end": end,
            },
            "stack": list(holder.get("stack", ())),
        }
    return {
        "thread": thread,
        "t": ended,
        "where": "uncaught",
        "died": True,
        "error": error,
        "stack": [],
        "window": {"thread": thread, "kind": "call", "start": entered, "end": ended},
        "culprit": culprit,
        "others": [],
        "probes": {},
    }


# Probe -> the events between which a thread holds its state.
_INSIDE = {"traceback-meta": ("annotate.tested", "annotate.left")}


def _span(
    events: Sequence[Mapping[str, Any]], thread: str, begin: str, left: str, at: float | None
) -> tuple[float | None, float | None]:
    """From when until when ``thread`` was inside at ``at``, or last before; the outermost counts.

    The end is None where it was not seen, both are where no begin was.
    """
    inside: list[float] = []
    span: tuple[float | None, float | None] = (None, None)
    for event in events:
        if event["thread"] != thread:
            continue
        if event["what"] == begin:
            if at is not None and not inside and event["t"] > at:
                return span
            inside.append(event["t"])
        elif event["what"] == left and inside:
            start = inside.pop()
            if not inside:
                span = start, event["t"]
                if at is not None and event["t"] >= at:
                    return span
    return (inside[0], None) if inside else span


def _last(events: Sequence[Mapping[str, Any]], thread: str, what: str) -> float | None:
    times = [e["t"] for e in events if e["thread"] == thread and e["what"] == what]
    return times[-1] if times else None


# -- stacks.txt ----------------------------------------------------------------------------------


def _stack_lines(
    crash: Mapping[str, Any], stacks: Mapping[str, Sequence[Mapping[str, Any]]] | str
) -> Iterator[str]:
    shown = set()
    for failure in crash.get("failures", ()):
        error, culprit = failure["error"], failure["culprit"]
        first = next(iter(error["message"].splitlines()), "")
        yield f"== {failure['thread']}: {error['type']}: {first}"
        yield from _frame_lines([*failure["stack"], *error["frames"]])
        shown.add(failure["thread"])
        if culprit is not None:
            yield f"-- {culprit['state']} held by {culprit['thread']} ({culprit['how']})"
            yield from _frame_lines(culprit["stack"])
            shown.add(culprit["thread"])
        yield ""
    for failure in crash.get("failures", ()):
        yield f"== {failure['thread']}: traceback as Python prints it"
        yield failure["error"].get("text", "").rstrip()
        yield ""
    for thread in crash.get("threads", ()):
        if thread.get("stack") and thread["thread"] not in shown:
            yield f"== {thread['thread']}: {thread['outcome']}"
            yield from _frame_lines(thread["stack"])
            yield ""
    if isinstance(stacks, str):
        yield stacks
        return
    for name, frames in stacks.items():
        if name not in shown:
            yield f"== {name}: at the moment of the first failure"
            yield from _frame_lines(frames)
            yield ""


def _frame_lines(frames: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for frame in frames:
        yield f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}'
        if frame["source"]:
            yield f"    {frame['source']}"


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    _write(path, json.dumps(data, indent=1, default=str) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
