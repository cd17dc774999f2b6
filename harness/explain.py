"""Says in a screenful what a crash folder holds: who died, of what, who held the state, what next.

Two formats are read: the folder of :mod:`harness.crash` (``crash.json``; also one that holds
several, ``process-*`` or one per case) and the trainer's (``report.json`` and ``stacks.txt``).
The latter has tracebacks and stacks as text only: its holder is whoever's stack stands in the
place that holds the state, which is told as probable.

Not covered: logs (``harness triage``), and folders without either file.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.capture import shorten
from harness.crash import SCHEMA

SIDE_BY_SIDE = 118  # columns from which on two stacks stand beside each other
# Frames that say nothing about a failure, and those that it is about.
_PLUMBING = ("/contextlib.py", "/threading.py", "/concurrent/futures/thread.py")
_CENTRAL = (
    "/torch/_dynamo/eval_frame.py",
    "/torch/_dynamo/convert_frame.py",
    "/torch/fx/_symbolic_trace.py",
    "/torch/fx/traceback.py",
    "/torch/fx/experimental/proxy_tensor.py",
)
_VICTIMS = 3  # shown in full; the others get a line

# State -> what to do about it. The first line is the one that stops the failure.
_GUARD = "dflash.compile.compile_guard('auto')"
_PATCHED = (
    "two FX traces overlapped and left nn.Module patched: this process cannot be used any more; "
    "trace under one lock",
)
ADVICE: dict[str, tuple[str, ...]] = {
    "fx-tracing-flag": (
        f"make the flag per thread: {_GUARD}, or torch >= 2.14",
        "torch 2.11 to 2.13: torch._dynamo.config.force_compile_during_fx_trace = True, set inside "
        "each thread",
        "a lock helps only round every compiled call and every backward, of all threads",
    ),
    "traceback-meta": (
        f"make torch.fx.traceback's metadata per thread: {_GUARD}; no torch up to 2.15 does",
        "uncompiled flex_attention enters it at run time: raise recompile_limit inside each thread",
    ),
    "fx-patcher": (
        "let one thread trace at a time: export, make_fx and symbolic_trace before the threads "
        "start, or under one lock",
    ),
    "module-getattr": _PATCHED,
    "module-call": _PATCHED,
    "make-fx-tracer": ("trace under one lock; compile all functions before the threads start",),
    "metrics-context": (f"torch 2.9 only: upgrade, or {_GUARD}",),
    "dispatch-mode": (
        "two threads were in torch's dispatch modes at once; Inductor's code reads the flag as it "
        "runs: compile before the threads start, or under one lock",
    ),
    "is-compiling": (
        "eager optimizers and collectives take traced branches while it is up: do not step while "
        "another thread compiles",
    ),
}
_UNKNOWN = (
    "no culprit is known: 'harness xray' shows what leaks on this torch; repeat with 'harness run "
    "--perturb SEED' to see whether it depends on timing",
)
_HANG = ("stacks.txt shows who waits and who owns the lock; 'py-spy dump --native' shows C frames",)
_NATIVE = (
    "stacks.txt holds the fault handler's stacks; run with CUDA_LAUNCH_BLOCKING=1 or under gdb for "
    "the C frames",
)


class ExplainError(ValueError):
    """The folder cannot be read; one line says why and what to do."""


@dataclass(frozen=True)
class Report:
    """One failure, in the shape of ``crash.json`` whatever it was read from."""

    folder: Path
    data: Mapping[str, Any]

    @property
    def failures(self) -> Sequence[Mapping[str, Any]]:
        failures: Sequence[Mapping[str, Any]] = self.data.get("failures", ())
        return failures

    @property
    def failed(self) -> bool:
        """Whether there is a failure in it at all."""
        process = self.data.get("process", {})
        return bool(
            self.failures
            or self.data.get("origin") == "training"  # a run that did not fail writes none
            or self.data.get("stuck")
            or self.data.get("canaries")
            or process.get("hung")
            or process.get("native")
            or process.get("ended") in ("signal", "exit", "hang", "raised")
            or any(t["outcome"] == "still running" for t in self._threads() if self._is_case())
        )

    def _threads(self) -> Sequence[Mapping[str, Any]]:
        threads: Sequence[Mapping[str, Any]] = self.data.get("threads", ())
        return threads

    def _is_case(self) -> bool:
        return self.data.get("origin") == "case"


# -- reading -------------------------------------------------------------------------------------


def load(folder: Path) -> list[Report]:
    """Every failure in ``folder``, its own first.

    Raises:
        ExplainError: there is none, or a file is damaged or of a later schema.
    """
    if not folder.is_dir():
        is_file = "is a file; name the folder that it is in"
        raise ExplainError(f"{folder}: {is_file if folder.exists() else 'no such folder'}")
    found = [_load_ours(path) for path in (folder / "crash.json",) if path.is_file()]
    for pattern in ("*/crash.json", "crashes/*/crash.json"):  # processes; cases of a test run
        found += [_load_ours(path) for path in sorted(folder.glob(pattern))]
    for path in (folder / "report.json", folder / "crash" / "report.json"):
        if path.is_file() and (report := _load_training(path)) is not None:
            found.append(report)
    if not found:
        raise ExplainError(
            f"{folder}: holds no crash.json and no report.json of a training run; a program that "
            "did not fail leaves none"
        )
    return found


def _load_ours(path: Path) -> Report:
    data = _json(path)
    schema = data.get("schema")
    if not isinstance(schema, int) or "failures" not in data:
        raise ExplainError(f"{path}: is not a crash report of this harness")
    if schema > SCHEMA:
        raise ExplainError(f"{path}: has schema {schema}, this harness knows {SCHEMA}; upgrade it")
    return Report(path.parent, data)


def _load_training(path: Path) -> Report | None:
    data = _json(path)
    if "workers" not in data or "reason" not in data:
        return None  # somebody else's report.json
    stacks = _read_stacks(path.with_name("stacks.txt"))
    failures = []
    for worker in data["workers"]:
        if worker.get("traceback"):
            error = _parse_traceback(worker["traceback"])
            failures.append(
                {
                    "thread": worker["worker"],
                    "t": None,
                    "where": f"packet {worker.get('packet')}",
                    "died": True,
                    "error": error,
                    "stack": [],
                    "window": None,
                    "culprit": _probable_holder(error, worker["worker"], stacks),
                    "others": [],
                    "probes": {},
                }
            )
    rest = ("at rest", "False", "{}", "default", "unknown")
    state = data.get("state", {})
    known = {"reason", "time", "torch", "python", "environment", "state", "workers"}
    return Report(
        path.parent,
        {
            "schema": SCHEMA,
            "origin": "training",
            "written": data.get("time", ""),
            "versions": {"torch": data.get("torch", ""), "python": data.get("python", "")},
            "process": {"ended": data["reason"], "hung": [], "native": False},
            "failures": failures,
            "threads": [
                {
                    "thread": worker["worker"],
                    "outcome": "raised" if worker.get("traceback") else worker.get("activity", ""),
                    "stack": stacks.get(worker["worker"], []),
                }
                for worker in data["workers"]
            ],
            # A run that is ended by force may be inside a compile: told, not judged.
            "seen": {name: value for name, value in state.items() if value not in rest},
            "stuck": [],
            "reason": data["reason"],
            "facts": {name: value for name, value in data.items() if name not in known},
        },
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ExplainError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ExplainError(f"{path}: is damaged ({error})") from error
    if not isinstance(data, dict):
        raise ExplainError(f"{path}: is not a crash report")
    return data


_FILE_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')


def _parse_frames(lines: Sequence[str]) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        if match := _FILE_LINE.match(line):
            following = lines[number + 1].strip() if number + 1 < len(lines) else ""
            frames.append(
                {
                    "file": match["file"],
                    "line": int(match["line"]),
                    "function": match["function"].strip(),
                    "source": "" if _FILE_LINE.match(following) else following,
                }
            )
    return frames


def _parse_traceback(text: str) -> dict[str, Any]:
    """The last exception of a printed traceback; what stands before it is what it followed."""
    last = text.rpartition("Traceback (most recent call last):")[2].splitlines()
    frames = _parse_frames(last)
    said = next((n for n in range(len(last)) if last[n][:1].strip() and ":" in last[n]), None)
    head = last[said] if said is not None else (last[-1] if last else "")
    kind, _, message = head.partition(": ")
    rest = last[said + 1 :] if said is not None else []
    return {
        "type": kind.strip(),
        "message": "\n".join([message, *rest]).strip(),
        "frames": frames,
        "causes": [],
        "text": text,
    }


def _read_stacks(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    parts = re.split(r"^thread (.+)$", text, flags=re.M)[1:]
    return {
        name.strip(): _parse_frames(body.splitlines())
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


# What an error says -> its state, and the frame that a holder's stack then has in it.
_SIGNS = (
    ("FX to symbolically trace", "fx-tracing-flag", "torch/fx/_symbolic_trace.py", "trace"),
    ("'custom'", "traceback-meta", "torch/fx/traceback.py", "annotate"),
    ("CURRENT_PATCHER", "fx-patcher", "torch/fx/_symbolic_trace.py", "trace"),
)


def _probable_holder(
    error: Mapping[str, Any], victim: str, stacks: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any] | None:
    for text, state, file, function in _SIGNS:
        if text not in error["message"]:
            continue
        for thread, frames in stacks.items():
            if thread != victim and any(
                f["file"].endswith(file) and f["function"] == function for f in frames
            ):
                return {
                    "thread": thread,
                    "state": state,
                    "how": "probably: its stack stands there",
                    "span": None,
                    "stack": frames,
                }
        return {"thread": None, "state": state, "how": "unknown", "span": None, "stack": []}
    return None


# -- summing up ----------------------------------------------------------------------------------


def summarize(report: Report) -> dict[str, Any]:
    """What :func:`render` shows, as plain data; the fields are described in ``docs/run.md``."""
    data = report.data
    process = data.get("process", {})
    return {
        "schema": SCHEMA,
        "folder": str(report.folder),
        "failed": report.failed,
        "headline": headline(report),
        "origin": data.get("origin", ""),
        "versions": data.get("versions", {}),
        "unfix": [name for name, done in data.get("unfix", {}).items() if done],
        "victims": [_victim(failure) for failure in report.failures],
        "stuck": [f"{row['probe']} is {row['value']}" for row in data.get("stuck", ())],
        "canaries": data.get("canaries", {}),
        "hung": process.get("hung", []),
        "running": _running(report) if process.get("hung") else [],
        "ended": process.get("ended", ""),
        "unaudited": data.get("unaudited", ""),
        "schedule": _schedule(data.get("schedule", {})),
        "next": list(advice(report)),
    }


def headline(report: Report) -> str:
    """One line: the first failure, and how many there are."""
    process = report.data.get("process", {})
    if process.get("native"):
        return f"the process died: {process['ended']}"
    if process.get("hung"):
        return str(process["ended"])
    if report.failures:
        first = _victim(report.failures[0])
        line = f"{first['thread']} {first['what']} at {first['raised_at'] or 'an unknown place'}"
        if first["culprit"]:
            line += f"; {first['state']} held by {first['culprit']}"
        more = len(report.failures) - 1
        return line + (f" (and {more} more)" if more else "")
    if stuck := report.data.get("stuck"):
        return "everybody stopped, and " + ", ".join(
            f"{row['probe']} is {row['value']}" for row in stuck
        )
    if canaries := report.data.get("canaries"):
        return f"everybody stopped, and {next(iter(canaries.values()))}"
    if report.failed:
        return f"the process ended: {process.get('what') or process.get('ended')}"
    return str(report.data.get("reason") or "no failure")


def advice(report: Report) -> Iterator[str]:
    """What to do next, most useful first."""
    process = report.data.get("process", {})
    states = [f["culprit"]["state"] for f in report.failures if f.get("culprit")]
    states += [row["probe"] for row in report.data.get("stuck", ())]
    if process.get("hung"):
        yield from _HANG
    if process.get("native"):
        yield from _NATIVE
    told: set[str] = set()
    for state in states:
        for line in ADVICE.get(state, ()):
            if line not in told:
                told.add(line)
                yield line
    if report.failures and not states:
        yield from _UNKNOWN


def _running(report: Report) -> list[dict[str, Any]]:
    """What each thread of a hung program was inside of, longest first."""
    rows = []
    for thread in report.data.get("threads", ()):
        if inside := thread.get("inside"):
            rows.append(
                {
                    "thread": thread["thread"],
                    "inside": [span["kind"] for span in inside],
                    "since": min(span["start"] for span in inside),
                    "at": _place(thread["stack"][-1]) if thread["stack"] else "",
                }
            )
    return sorted(rows, key=lambda row: row["since"])


def _victim(failure: Mapping[str, Any]) -> dict[str, Any]:
    error, culprit = failure["error"], failure.get("culprit")
    frames = error.get("frames", [])
    first = next(iter(error["message"].splitlines()), "")
    kind = error["type"].rpartition(".")[2]
    return {
        "thread": failure["thread"],
        "died": failure["died"],
        "what": f"died of {kind}" if failure["died"] else f"got {kind} (and caught it)",
        "exception": error["type"],
        "message": first,
        "raised_at": _place(frames[-1]) if frames else "",
        "state": culprit["state"] if culprit else None,
        "culprit": culprit["thread"] if culprit else None,
        "how": culprit["how"] if culprit else None,
        "overlap": _overlap(failure),
        "stack": [*failure.get("stack", []), *frames],
        "culprit_stack": culprit["stack"] if culprit else [],
        "beside": sorted({s["thread"] for s in failure.get("others", ())}),
    }


def _overlap(failure: Mapping[str, Any]) -> dict[str, Any] | None:
    """Seconds from the program's start; ``end`` None: it was inside still when this was written."""
    culprit, window = failure.get("culprit"), failure.get("window")
    span = culprit.get("span") if culprit else None
    if span is None or span.get("start") is None or window is None or window.get("start") is None:
        return None
    failed = failure["t"] if failure["t"] is not None else window.get("end")
    if failed is None:
        return None
    begun = max(span["start"], window["start"])
    ended = failed if span["end"] is None else min(failed, span["end"])
    return {
        "victim": [window["start"], failed],
        "culprit": [span["start"], span["end"]],
        "kind": span["kind"],
        "seconds": round(max(0.0, ended - begun), 6),
    }


def _place(frame: Mapping[str, Any]) -> str:
    return f"{shorten(frame['file'])}:{frame['line']} {frame['function']}"


def _schedule(schedule: Mapping[str, Any]) -> str:
    if schedule.get("kind") == "perturbed":
        met = sum(w["ended"].startswith("fulfilled") for w in schedule["waits"])
        return (
            f"perturbed, seed {schedule['seed']}: {len(schedule['waits'])} waits, {met} fulfilled"
        )
    return "; ".join(schedule.get("steps", ()))


# -- showing -------------------------------------------------------------------------------------


def render(report: Report, *, width: int, color: bool) -> str:
    """The screenful as text."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        no_color=not color,
        emoji=False,
        highlight=False,
    )
    summary = summarize(report)
    versions = summary["versions"]
    unfixed = f" without {', '.join(summary['unfix'])}" if summary["unfix"] else ""
    console.print(f"[bold]{escape(summary['headline'])}[/bold]", soft_wrap=True)
    console.print(
        f"torch {versions.get('torch', 'unknown')}{escape(unfixed)}, Python "
        f"{versions.get('python', 'unknown')}; {escape(str(report.folder))}",
        soft_wrap=True,
    )
    if summary["ended"] and summary["origin"] != "case":
        console.print(f"end: {escape(summary['ended'])}", soft_wrap=True)
    for victim in summary["victims"][:_VICTIMS]:
        _render_victim(console, victim, width, short=victim is not summary["victims"][0])
    for victim in summary["victims"][_VICTIMS:]:
        console.print(f"also: {escape(victim['thread'])} {escape(victim['what'])}")
    console.print()
    for line in _facts(summary):
        console.print(escape(line), soft_wrap=True)
    if summary["next"]:
        console.print("\n[bold]next[/bold]")
        for line in summary["next"]:
            console.print(f"- {escape(line)}")
    return out.getvalue()


def _render_victim(console: Console, victim: Mapping[str, Any], width: int, *, short: bool) -> None:
    console.print(
        f"\n[red]{escape(victim['thread'])}[/red] {escape(victim['what'])}: "
        f"{escape(victim['message'])}"
    )
    console.print(f"  raised at  {escape(victim['raised_at'] or 'unknown')}")
    if victim["state"]:
        who = victim["culprit"] or "nobody that the report knows"
        console.print(
            f"  state      {escape(victim['state'])}, held by [yellow]{escape(who)}[/yellow]"
            + (f" ({escape(victim['how'])})" if victim["how"] and victim["culprit"] else "")
        )
    elif victim["beside"]:
        console.print(f"  beside     {escape(', '.join(victim['beside']))} compiled meanwhile")
    if victim["overlap"]:
        console.print(f"  overlap    {escape(_overlap_text(victim))}")
    if short:
        return
    left = _stack_text(victim["stack"])
    right = _stack_text(victim["culprit_stack"])
    titles = f"victim {victim['thread']}", f"holder {victim['culprit']}"
    console.print()
    if right and width >= SIDE_BY_SIDE:
        table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
        for title in titles:
            table.add_column(escape(title), ratio=1, overflow="fold")
        table.add_row(escape(left), escape(right))
        console.print(table)
        return
    for title, text in zip(titles, (left, right), strict=True):
        if text:
            console.print(f"[bold]{escape(title)}[/bold]")
            console.print(escape(text))


def _overlap_text(victim: Mapping[str, Any]) -> str:
    overlap = victim["overlap"]
    start, end = overlap["culprit"]
    called, failed = overlap["victim"]
    until = f"to {end:.3f} s" if end is not None else "on (not left when this was written)"
    return (
        f"{overlap['seconds'] * 1000:.1f} ms: {victim['culprit']} in its {overlap['kind']} from "
        f"{start:.3f} {until}; {victim['thread']} entered at {called:.3f}, failed at {failed:.3f}"
    )


def _stack_text(frames: Sequence[Mapping[str, Any]]) -> str:
    """The user's last frames, the compile machinery's last ones, and the innermost."""
    frames = [f for f in frames if not f["file"].endswith(_PLUMBING)]
    if not frames:
        return ""
    numbers = range(len(frames))
    own = [n for n in numbers if _is_users(frames[n])][-3:]
    central = {
        f["file"]: n for n, f in enumerate(frames) if f"/{f['file']}".endswith(_CENTRAL)
    }  # the last one in each file
    lines, before = [], -1
    for number in sorted({*own, *central.values(), *numbers[-3:]}):
        if number > before + 1:
            hidden = number - before - 1
            lines.append(f"  ... {hidden} frame{'s' if hidden > 1 else ''}")
        lines.append(f"  {_place(frames[number])}")
        before = number
    if frames[-1].get("source"):
        lines.append(f"    {frames[-1]['source'][:100]}")
    return "\n".join(lines)


def _is_users(frame: Mapping[str, Any]) -> bool:
    file = frame["file"]
    return not any(part in file for part in ("site-packages", "dist-packages", "/lib/python", "<"))


def _facts(summary: Mapping[str, Any]) -> Iterator[str]:
    for row in summary["running"]:
        inside = ", ".join(row["inside"])
        yield f"{row['thread']}: in its {inside} since {row['since']:.3f} s, at {row['at']}"
    if summary["stuck"]:
        yield f"not at rest at the end: {'; '.join(summary['stuck'])}"
    elif summary["unaudited"]:
        yield f"state at the end: not audited, {summary['unaudited']}"
    elif summary["origin"] == "run":
        yield "state at the end: at rest"
    for name, what in summary["canaries"].items():
        yield f"canary {name}: {what}"
    if summary["schedule"]:
        yield f"schedule: {summary['schedule']}"


def show(folder: Path, *, as_json: bool, width: int, color: bool) -> tuple[str, bool]:
    """The text for ``harness explain``, and whether there is a failure in the folder.

    Raises:
        ExplainError: it cannot be read.
    """
    try:
        reports = load(folder)
        failed = any(report.failed for report in reports)
        if as_json:
            data = {"failed": failed, "reports": [summarize(report) for report in reports]}
            return json.dumps(data, indent=1), failed
        text = "\n".join(render(report, width=width, color=color) for report in reports)
        return text.rstrip("\n"), failed
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # edited, or another's
        why = f"{type(error).__name__}: {error}"
        raise ExplainError(f"{folder}: a report in it is damaged ({why})") from error
