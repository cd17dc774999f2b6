"""A diagnosis as JSON (docs/triage.md describes it), SARIF and GitHub annotations."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

from harness.triage.collect import Group
from harness.triage.diagnosis import SCHEMA, UNKNOWN_ID, Diagnosis
from harness.triage.events import Event, Place

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"high": "error", "medium": "error", "low": "warning"}


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The stable form; `schema` grows when a key changes its meaning or goes."""
    torch = diagnosis.torch
    return {
        "schema": SCHEMA,
        "inputs": list(diagnosis.inputs),
        "exit_code": diagnosis.exit_code,
        "torch": {
            "version": torch.version,
            "how": torch.how,
            "candidates": list(torch.candidates),
            "why": torch.why,
            "conflict": torch.conflict,
        },
        "causes": [
            {
                "id": cause.id,
                "confidence": cause.confidence,
                "title": cause.title,
                "why": cause.why,
                "state": cause.state,
                "versions": cause.versions,
                "fix": cause.fix,
                "workarounds": list(cause.workarounds),
                "guard": cause.guard,
                "references": list(cause.references),
                "next": list(cause.next),
                "secondary": cause.secondary,
                "alternative": cause.alternative,
                "failures": list(cause.failures),
                "evidence": [_place(place) for place in cause.evidence],
            }
            for cause in diagnosis.causes
        ],
        "failures": [_group(diagnosis, g, i) for i, g in enumerate(diagnosis.failures)],
        "handled": [_group(diagnosis, g, None) for g in diagnosis.handled],
        "dumps": [_group(diagnosis, g, None) for g in diagnosis.dumps],
        "speakers": [
            {
                "who": fate.who,
                "state": fate.state,
                "last": _place(fate.last),
                "time": fate.time,
                "text": fate.text,
            }
            for fate in diagnosis.fates
        ],
        "unsaid": diagnosis.unsaid,
        "next": diagnosis.next,
        "grep": diagnosis.grep,
        "grep_found": diagnosis.grep_found,
        "lines_parsed": diagnosis.lines,
        "last_time": diagnosis.last_time,
        "seconds_after": diagnosis.seconds_after,
        "trace": diagnosis.trace or None,
    }


def _place(place: Place) -> dict[str, Any]:
    return {"input": place.name, "offset": place.offset, "line": place.line}


def _group(diagnosis: Diagnosis, group: Group, index: int | None) -> dict[str, Any]:
    cause = diagnosis.cause_of(index) if index is not None else None
    return {
        "count": group.count,
        "threads": group.threads,
        "ranks": group.ranks,
        "first": _place(group.first),
        "last": _place(group.last),
        "first_time": group.first_time,
        "last_time": group.last_time,
        "cause": cause.id if cause else None,
        **_event(diagnosis, group.event),
    }


def _event(diagnosis: Diagnosis, event: Event) -> dict[str, Any]:
    return {
        "kind": str(event.kind),
        "type": event.type,
        "message": event.message,
        "context": event.context,
        "whole": event.whole,
        "compile_id": event.compile_id,
        "details": event.details,
        "frames": [
            {
                "file": frame.file,
                "line": frame.line,
                "function": frame.function,
                "source": frame.source,
                "role": role.words if frame.of_torch else None,
                "act": role.act.name.lower() if role.act and frame.of_torch else None,
            }
            for frame, role in diagnosis.frames_of(event)
        ],
        "causes": [_event(diagnosis, cause) for cause in event.causes],
        "stacks": [
            {
                "thread": stack.thread,
                "state": stack.state,
                "frames": [frame.short() for frame in stack.frames],
            }
            for stack in event.stacks
        ],
    }


def as_sarif(diagnosis: Diagnosis) -> dict[str, Any]:
    """SARIF 2.1.0: a result per failure, at its line of the log."""
    rules = {
        cause.id: {
            "id": cause.id,
            "shortDescription": {"text": cause.title},
            "fullDescription": {"text": cause.why},
            "help": {"text": cause.fix or "see the references"},
        }
        for cause in diagnosis.causes
    }
    rules.setdefault(UNKNOWN_ID, {"id": UNKNOWN_ID, "shortDescription": {"text": "Unknown"}})
    try:
        mine = version("dflash-trainer")
    except PackageNotFoundError:
        mine = "0"
    return {
        "$schema": _SARIF,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "harness triage",
                        "version": mine,
                        "rules": list(rules.values()),
                    }
                },
                "results": [
                    {
                        "ruleId": rule,
                        "level": level,
                        "message": {"text": text},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": quote(place.name, safe="/,")},
                                    "region": {"startLine": place.line or 1},
                                }
                            }
                        ],
                    }
                    for rule, level, text, place in _results(diagnosis)
                ],
            }
        ],
    }


def as_github(diagnosis: Diagnosis) -> Iterator[str]:
    """Workflow commands: an annotation at the log's line for each failure."""
    for rule, level, text, place in _results(diagnosis):
        where = f"file={_escaped(place.name, in_property=True)},line={place.line or 1},"
        where = "" if place.name == "-" else where  # standard input is no file
        yield f"::{level} {where}title={_escaped(rule, in_property=True)}::{_escaped(text)}"


def _results(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str, Place]]:
    """(cause, level, text, place) for each failure, then for causes without one."""
    for index, group in enumerate(diagnosis.failures):
        cause = diagnosis.cause_of(index)
        what = headline(group)
        if cause is None or cause.id == UNKNOWN_ID:
            yield UNKNOWN_ID, "error", f"{what}. Cause unknown.", group.first
            continue
        text = f"{what}. {cause.title} (confidence {cause.confidence}). {cause.why}"
        yield cause.id, _LEVELS[cause.confidence], text, group.first
    for cause in diagnosis.causes:
        if not cause.failures and cause.evidence:
            text = f"{cause.title} (confidence {cause.confidence}). {cause.why}"
            yield cause.id, _LEVELS[cause.confidence], text, cause.evidence[0]


def headline(group: Group) -> str:
    """One line: what, how often, who."""
    event = group.event
    what = event.type or (event.frames[-1].short() if event.frames else str(event.kind))
    message = event.message.strip().partition("\n")[0]
    if message and event.type != "ERROR":
        what = f"{what}: {message[:200]}"
    elif message:
        what = message[:200]
    if not event.type and event.frames:
        what = f"frames only, down to {what}"
    times = f" (x{group.count})" if group.count > 1 else ""
    who = f" in {', '.join(group.threads[:8])}" if group.threads else ""
    more = f" and {len(group.threads) - 8} more" if len(group.threads) > 8 else ""
    return f"{what}{times}{who}{more}"


def _escaped(text: str, *, in_property: bool = False) -> str:
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    if in_property:
        text = text.replace(":", "%3A").replace(",", "%2C")
    return text
