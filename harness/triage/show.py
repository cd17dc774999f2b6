"""A diagnosis for people: on a terminal, and as Markdown for an issue."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from harness.triage.collect import Group
from harness.triage.diagnosis import Cause, Diagnosis
from harness.triage.events import Event
from harness.triage.output import headline

FRAMES_SHOWN = 14
GROUPS_SHOWN = 20
_COLORS = {"high": "red", "medium": "yellow", "low": "cyan"}
_WIDTH = 100
_COPIED = "none"  # a command: not broken into lines


def terminal(diagnosis: Diagnosis, *, width: int = _WIDTH, color: bool = False) -> str:
    """The whole answer as text; colours only on demand."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, no_color=not color, emoji=False,
        highlight=False, soft_wrap=False,
    )  # fmt: skip
    for style, text in _lines(diagnosis):
        console.print(Text(text, style=style), soft_wrap=style == _COPIED)
    return out.getvalue()


def _lines(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "", f"{', '.join(diagnosis.inputs) or 'trace'}: {_torch(diagnosis)}"
    if not diagnosis.failures and not diagnosis.causes:
        yield "green", "nothing failed"
    for cause in diagnosis.causes:
        yield from _cause(cause)
    if diagnosis.failures:
        yield "bold", ""
        yield "bold", "failures, in order"
    if (diagnosis.seconds_after or 0) > 1:
        yield "", f"  the log goes on for {diagnosis.seconds_after:.0f} s after the first one"
    for index, group in enumerate(diagnosis.failures[:GROUPS_SHOWN]):
        yield from _failure(diagnosis, index, group)
    if len(diagnosis.failures) > GROUPS_SHOWN:
        yield "dim", f"  and {len(diagnosis.failures) - GROUPS_SHOWN} more (--json has all)"
    yield from _dumps(diagnosis)
    if diagnosis.fates:
        yield "bold", ""
        yield "bold", "who"
        for state in ("died", "silent", "alive"):
            fates = [fate for fate in diagnosis.fates if fate.state == state]
            for fate in fates[:12]:
                when = f" {fate.time}" if fate.time else ""
                yield "", f"  {fate.who}: {state}, last heard{when} ({fate.last})"
            if len(fates) > 12:
                yield "dim", f"  and {len(fates) - 12} more {state}"
    if diagnosis.trace:
        yield from _trace(diagnosis)
    for title, texts in (("the text cannot tell", diagnosis.unsaid), ("next", diagnosis.next)):
        if texts:
            yield "bold", ""
            yield "bold", title
            for text in texts:
                yield _COPIED if title == "next" else "", f"  {text}"
    if diagnosis.grep_found:
        yield "bold", ""
        yield "bold", "the same lines by grep"
        yield _COPIED, f"  LC_ALL=C grep -nE '{diagnosis.grep_found}'"


def _torch(diagnosis: Diagnosis) -> str:
    torch = diagnosis.torch
    if torch.version is None:
        return f"torch version unknown ({torch.why})"
    return f"torch {torch.version} ({torch.how}: {torch.why})"


def _cause(cause: Cause) -> Iterator[tuple[str, str]]:
    yield "bold", ""
    note = _note(cause)
    yield (
        f"bold {_COLORS[cause.confidence]}",
        f"{cause.id}: {cause.title} (confidence {cause.confidence}{note})",
    )
    yield "", f"  {cause.why}"
    if cause.secondary or cause.alternative:
        return
    for name in ("state", "versions", "fix", "guard"):
        text = getattr(cause, name)
        if text:
            yield "", f"  {name}: {text}"
    for text in cause.workarounds:
        yield "", f"  or: {text}"
    if cause.references:
        yield "dim", f"  see: {', '.join(cause.references)}"
    if cause.evidence:
        yield "dim", f"  evidence: {', '.join(str(place) for place in cause.evidence[:5])}"


def _failure(diagnosis: Diagnosis, index: int, group: Group) -> Iterator[tuple[str, str]]:
    cause = diagnosis.cause_of(index)
    when = f" at {group.first_time}" if group.first_time else ""
    if group.last_time and group.last_time != group.first_time:
        when += f" .. {group.last_time}"
    where = str(group.first) + (f" .. {group.last}" if group.count > 1 else "")
    yield "", f"{index + 1:3}. {headline(group)}"
    yield "dim", f"     {where}{when}; cause: {cause.id if cause else 'unknown'}"
    for event in group.event.chain():
        if event is not group.event:
            first = event.message.partition("\n")[0][:160]
            yield "", f"     behind it: {event.type}: {first}"
        yield from _frames(diagnosis, event)


def _frames(diagnosis: Diagnosis, event: Event) -> Iterator[tuple[str, str]]:
    frames = diagnosis.frames_of(event)
    shown = frames[-FRAMES_SHOWN:]
    if len(shown) < len(frames):
        yield "dim", f"       ({len(frames) - len(shown)} outer frames)"
    for frame, role in shown:
        if frame.of_torch:
            yield (
                ("yellow" if "raises" in role.words else ""),
                (f"       {frame.short()}  [{role.words}]"),
            )
        else:
            yield "dim", f"       {frame.short()}"


def _dumps(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    for group in diagnosis.dumps[:3]:
        yield "bold", ""
        yield "bold", f"stacks ({group.event.type}, {group.first})"
        for stack in group.event.stacks[:16]:
            yield "", f"  {stack.thread} {stack.state}".rstrip()
            for frame in stack.frames[-4:]:
                yield "dim", f"    {frame.short()}"


def _trace(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    trace = diagnosis.trace
    yield "bold", ""
    compiles = trace["compiles"]
    failed = sum(one["fail_type"] is not None for one in compiles)
    yield "bold", f"trace {trace['folder']}: {len(compiles)} compiles, {failed} failed"
    for joined in trace["joined"]:
        own = f"is compile {joined['compile']}" if joined["compile"] else "belongs to no compile"
        beside = f"; beside it went on: {', '.join(joined['beside'])}" if joined["beside"] else ""
        yield "", f"  failure {joined['failure'] + 1} {own}{beside}"


def markdown(diagnosis: Diagnosis) -> str:
    """The answer for an issue: a summary, a table of failures, the stacks folded."""
    out = [
        f"**Log:** {_code(', '.join(diagnosis.inputs))}  ",
        f"**torch:** {_torch(diagnosis)}",
        "",
    ]
    if not diagnosis.failures and not diagnosis.causes:
        return "\n".join([*out, "Nothing failed.", ""])
    for cause in diagnosis.causes:
        note = _note(cause)
        out.append(f"### {cause.title} (`{cause.id}`, confidence {cause.confidence}{note})")
        out += ["", _plain(cause.why), ""]
        if cause.secondary or cause.alternative:
            continue
        for name in ("state", "versions", "fix", "guard"):
            if getattr(cause, name):
                out.append(f"* {name}: {getattr(cause, name)}")
        out += [f"* or: {text}" for text in cause.workarounds]
        if cause.references:
            out.append(f"* see: {', '.join(cause.references)}")
        out.append("")
    if diagnosis.failures:
        out += ["| # | failure | times | who | first | cause |", "|---|---|---|---|---|---|"]
        for index, group in enumerate(diagnosis.failures[:GROUPS_SHOWN]):
            cause_of = diagnosis.cause_of(index)
            event = group.event
            what = f"{event.type or event.kind}: {event.message.partition(chr(10))[0][:120]}"
            who = _code(", ".join(group.threads[:8])) if group.threads else "not named"
            row = [str(index + 1), _code(what), str(group.count), who, _code(str(group.first)),
                   cause_of.id if cause_of else "unknown"]  # fmt: skip
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        out.append("")
        for index, group in enumerate(diagnosis.failures[:GROUPS_SHOWN]):
            stack = [text.strip() for e in group.event.chain() for _, text in _frames(diagnosis, e)]
            if stack:
                out += [f"<details><summary>stack of {index + 1}</summary>", "", "```"]
                out += [*(text.replace("`", "'") for text in stack), "```", "", "</details>", ""]
    for title, texts in (("The text cannot tell", diagnosis.unsaid), ("Next", diagnosis.next)):
        if texts:
            out += [
                f"**{title}**",
                "",
                *(f"* {_code(t) if title == 'Next' else _plain(t)}" for t in texts),
            ]
            out.append("")
    return "\n".join(out)


def _note(cause: Cause) -> str:
    if cause.alternative:
        return ", less likely"
    return ", a consequence" if cause.secondary else ""


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def _plain(text: str) -> str:
    """Text that may quote a log: no markup, no link, no mention of anybody."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text).replace("@", "@\u200b")
