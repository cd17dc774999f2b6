"""What a log's own words say beside a traceback: who failed, whether it was dealt with, and what.

Covered: names of threads in a message (``drafter-1``), "retrying" and its like, an exception that a
line states without a traceback. English only.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from harness.triage.events import MESSAGE_CHARACTERS, Event, Kind
from harness.triage.lines import Line

_NAMED = re.compile(
    r"(?<![\w/.-])(Thread-\d{1,6} \([\w.<>]{1,80}\)|[A-Za-z][A-Za-z_]{1,30}-\d{1,4}(?:_\d{1,4})?)"
    r"(?![\w.-])"
)
_HANDLED = re.compile(
    r"\b(?:retry|retrying|retried|will retry|falling back|fall back|fallback|ignored|ignoring"
    r"|skipped|skipping|handled|recovered|expected|non-fatal)\b",
    re.I,
)
_PASSED_OVER = ("Exception ignored in", "--- Logging error ---")
_RETRIED = re.compile(r"\b(?:retry|retrying|will retry|falling back)\b", re.I)
_FAILED = re.compile(r"fail|error|exception|could not|cannot|unable|caught|invalid|refused", re.I)
_SURVIVED_LEVELS = {"DEBUG", "INFO", "WARNING", "NOTICE", "TRACE"}
_NO_NAMES = {"utf-8", "utf-16", "cp-1252", "sha-256", "sha-1", "iso-8859"}
_FREE = re.compile(
    r"(?:^\^C|^E {2,}|(?<![\w.]))([\w.]*(?:Error|Exception|Interrupt|Exit))(?:: (.*)|$)"
)
# "KeyError in worker-3: ..."; the class must be a certain one, "Error in ..." is any program's.
_FREE_IN = re.compile(
    r"(?<![\w.])([\w.]*[a-z](?:Error|Exception)) (?:in|on|from) "
    r"((?:thread |worker |process )?[\w.-]{1,60}(?: \([\w.<>]{1,80}\))?): (.*)"
)
# Prose about a failure that need not have been: release notes, help texts, lists of repairs.
_ABOUT = re.compile(
    r"\b(?:if|when(?:ever)?|should|in case) (?:you|one|anyone|users?|they) (?:\w+ )?"
    r"(?:see|saw|meet|get|got|hit|encounter|run into|face|notice|observe)\b"
    r"|\b(?:known issues?|fix(?:es|ed)?|no longer|work ?around for|resolves?d?|closes)\b.{0,30}$",
    re.I,
)
# A commit's subject, a quotation, an expected failure of pytest's summary.
_CITED = re.compile(
    r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40} (?:\([^)]{1,80}\) )?[A-Z]|\s{0,8}(?:> |XFAIL )"
)
# A text that only passes through the program: a prompt, a pattern that a test expects.
_OF_OTHERS = re.compile(
    r"\b(?:prompts?|questions?|instructions?|completions?|samples?|examples?|generated|decoded"
    r"|match|regex|pattern)[\"']?\s*[=:]\s*\[?[rbf]?[\"']",
    re.I,
)
_CLASS_END = re.compile(r"[a-z](?:Error|Exception)\b")
# How pytest ends a failure, also one whose exception it shows as `assert 3 == 4`.
_TEST_FAILED = re.compile(
    r"(?:FAILED [^\s:]+::\S+(?: - |$)|\S+\.py:\d+: [\w.]*(?:Error|Exception)$)"
)
_CLASS_LETTERS = f"{string.ascii_letters}._"
ABOUT_CHARACTERS = 120
_CODE_SPAN = re.compile(r"``?[^`]{0,200}[a-z](?:Error|Exception): [^`]*``?")
# What an exception group puts before the lines of its members.
DECORATION = re.compile(r"^ *(?:[|+](?:-\+)?-* ?)+(?:\d+ -+)?")


def free_exception(line: Line, name: str) -> Iterator[Event]:
    """An exception that a log line states without a traceback."""
    text = line.text
    if text.lstrip(" ")[:1] in ("|", "+"):  # a member of an exception group without a stack
        text = DECORATION.sub("", text)
    found = _FREE.search(text)
    inside = _FREE_IN.search(text)
    if inside is not None and (found is None or inside.start() <= found.start()):
        found, who, message = inside, named_in(inside[2]), inside[3]
    elif found is not None:
        who, message = None, found[2]
    if found is None or not found[1].rpartition(".")[2][:1].isupper():
        return
    stated = line.level in ("ERROR", "CRITICAL") or found.start() == 0
    if not stated or (line.level in _SURVIVED_LEVELS):
        return
    before = text[: found.start(1)]
    yield Event(
        Kind.EXCEPTION,
        line.place(name),
        type=found[1],
        message=(message or "")[:MESSAGE_CHARACTERS],
        thread=line.thread or who or named_in(before),
        rank=line.rank,
        time=line.time,
        context=before[:300],
        handled=handled(line.text, line.level),
        compile_id=line.compile_id,
    )


def handled(context: str, level: str | None) -> bool:
    """Whether the line before says that the program dealt with it.

    The line before a crash is mostly the last one that the program wrote about something else, so
    a low level alone says nothing.
    """
    if passed_over(context):
        return True
    if level in ("ERROR", "CRITICAL"):
        return bool(_RETRIED.search(context))
    if _HANDLED.search(context):
        return True
    return level in _SURVIVED_LEVELS and level != "INFO" and bool(_FAILED.search(context))


def passed_over(context: str) -> bool:
    """Whether Python itself says that nothing came of it, be it the last word of the program."""
    return context.startswith(_PASSED_OVER)


def of_others(text: str) -> str:
    """What stands before a text that only passes through (a prompt, a pattern); "" if none does."""
    found = _OF_OTHERS.search(text)
    return text[: found.start()] or " " if found else ""


def reported(text: str) -> str:
    """The text without what it only talks about.

    An exception in a code span, in a commit's subject, in a quotation, in a prompt, or behind "if
    you see", happened elsewhere, or never.
    """
    if _CITED.match(text):
        return ""
    text = of_others(text) or text
    text = _CODE_SPAN.sub("", text)
    for found in _CLASS_END.finditer(text):
        before = text[: found.start()].rstrip(_CLASS_LETTERS)
        if _ABOUT.search(before, max(0, len(before) - ABOUT_CHARACTERS)):
            return before
    return text


def says_failed(line: Line) -> bool:
    """Whether the line alone, without an exception's words, says that something failed."""
    return line.level in ("ERROR", "CRITICAL") or bool(_TEST_FAILED.match(line.text))


def named_in(text: str) -> str | None:
    """A thread's name as programs write it into a message: ``drafter-1``, ``Thread-4``."""
    for found in _NAMED.finditer(text[:300]):
        if found[1].lower() not in _NO_NAMES:
            return found[1]
    return None
