"""The rule base: causes as data, one file each in `rules/`, and the one reader of them.

A rule names a cause (the ids stand in `tests/triage/causes.toml`) and holds matches. A match is a
set of conditions on one group of equal failures and on the rest of the log; all must hold. The
first match of a rule that holds gives the confidence. To add a rule, add a file and a log with its
answer to the corpus.

Fields of a rule: `id`, `title`, `state` (what is shared), `why`, `versions` (of torch, such as
">=2.12,<2.14"; a log of another known version does not match), `fix`, `workarounds`, `guard` (what
of the trainer covers it), `references`, `next` (commands), `literals` (for the search of the log,
where the base literals do not mark the lines), `secondary` (a consequence of something else
wherever the log holds another cause), `matches`.

Conditions of a match, regular expressions unless said otherwise:

=================  ==============================================================================
kind               list of event kinds; without it exceptions and loose frames
type, message      of an exception, of the group or of any in its chain
not_message        not in its message
context            the line before
frames             all of them stand in the stack (``file:function=act``), in any order
ends_in            the innermost frame
source             the source line of the innermost frame
without            none of them stands in the stack
from_start         true: the stack begins where a thread or a program begins, and has no gap
headless           true: no exception line, frames only
log, not_log       (all of / none of) somewhere in the log's other lines or messages
often              the first of `log` was said at least so often
stacks             one thread of a dump has all of them
stacks_without     none of them stands in the thread that has all of `stacks`
stack_ends         one thread of a dump has it as its innermost frame
twice              one thread of a dump has it at least twice
beside             another thread of the dump has all of them; `stacks` and `stack_ends` are then
                   asked of one thread
threads, repeats   at least so many threads; at least so many times for each of them
versions           as above, for this match alone; `known` = true: the version must be known
confidence         "high", "medium" or "low"; low where only lines of level INFO say so
why                the sentence that replaces the rule's
=================  ==============================================================================
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.triage.collect import Group
from harness.triage.events import Event, Frame, Kind
from harness.triage.roles import TorchVersion, numbers, role

FOLDER = Path(__file__).parent / "rules"
CONFIDENCES = ("high", "medium", "low")
_ORDINARY = (Kind.EXCEPTION, Kind.FRAMES)
_CONDITIONS = {
    "kind", "type", "message", "not_message", "context", "frames", "ends_in", "source", "without",
    "from_start", "headless", "log", "not_log", "often", "stacks", "stacks_without", "stack_ends",
    "twice", "beside", "threads", "repeats", "versions", "known", "confidence", "why",
}  # fmt: skip
_FIELDS = {
    "id", "title", "state", "why", "versions", "fix", "workarounds", "guard", "references", "next",
    "literals", "secondary", "matches",
}  # fmt: skip
_OF_A_GROUP = {
    "kind", "type", "message", "not_message", "context", "frames", "ends_in", "source", "without",
    "from_start", "headless", "threads", "repeats",
}  # fmt: skip
_OF_A_STACK = ("stacks", "stack_ends", "twice", "beside")
# Functions at which a thread or a program begins: a stack that starts there is complete.
_STARTS = {"<module>", "_bootstrap", "_bootstrap_inner", "_worker", "_run_module_as_main"}
_RANGE = re.compile(r"(>=|<=|<|>|==)(\d+(?:\.\d+)*)")


class BadRule(Exception):
    """A rule file that cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Rule:
    """One cause with its matches, as read from its file."""

    id: str
    title: str
    state: str
    why: str
    versions: str
    fix: str
    workarounds: tuple[str, ...]
    guard: str
    references: tuple[str, ...]
    next: tuple[str, ...]
    literals: tuple[str, ...]
    secondary: bool
    matches: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Finding:
    """A rule that matched.

    Attributes:
        group: the failure that it explains; None when only other lines of the log show it.
        evidence: the lines or the group by which it matched.
        depth: which exception of the group's chain matched; the last one came first.
        weak: only lines say so: it does not explain a failure that no rule explains.
    """

    rule: Rule
    confidence: str
    why: str
    group: Group | None
    evidence: tuple[Group, ...]
    weak: bool = False
    depth: int = 0


@dataclass(frozen=True)
class Log:
    """What a rule can look at; `told` remembers which groups hold an expression."""

    torch: TorchVersion
    failures: Sequence[Group]
    notices: Sequence[Group]
    dumps: Sequence[Group]
    told: dict[str, list[Group]] = field(default_factory=dict)


@lru_cache(maxsize=1)
def load() -> tuple[Rule, ...]:
    """All rules, in the order of their file names. Raises BadRule."""
    return tuple(read(path) for path in sorted(FOLDER.glob("*.toml")))


def read(path: Path) -> Rule:
    """One rule. Raises BadRule for a field, condition or expression that is none."""
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadRule(f"{path.name}: {error}") from error
    if unknown := sorted(data.keys() - _FIELDS):
        raise BadRule(f"{path.name}: unknown field {unknown[0]!r}")
    for index, match in enumerate(data.get("matches", ()), start=1):
        if unknown := sorted(match.keys() - _CONDITIONS):
            raise BadRule(f"{path.name}: match {index}: unknown condition {unknown[0]!r}")
        if match.get("confidence") not in CONFIDENCES:
            raise BadRule(f"{path.name}: match {index}: confidence must be one of {CONFIDENCES}")
        for text in _expressions(match):
            try:
                re.compile(text)
            except re.error as error:
                raise BadRule(f"{path.name}: match {index}: {text!r}: {error}") from error
    missing = [key for key in ("id", "title", "why", "matches") if not data.get(key)]
    if missing:
        raise BadRule(f"{path.name}: {missing[0]} is missing")
    return Rule(
        id=data["id"],
        title=data["title"],
        state=data.get("state", ""),
        why=" ".join(data["why"].split()),
        versions=data.get("versions", ""),
        fix=" ".join(data.get("fix", "").split()),
        workarounds=tuple(data.get("workarounds", ())),
        guard=" ".join(data.get("guard", "").split()),
        references=tuple(data.get("references", ())),
        next=tuple(data.get("next", ())),
        literals=tuple(data.get("literals", ())),
        secondary=bool(data.get("secondary", False)),
        matches=tuple(data["matches"]),
    )


def _expressions(match: dict[str, Any]) -> Iterable[str]:
    for key in (
        "type",
        "message",
        "not_message",
        "context",
        "ends_in",
        "source",
        "stack_ends",
        "twice",
    ):
        if key in match:
            yield match[key]
    for key in ("frames", "without", "log", "not_log", "stacks", "stacks_without", "beside"):
        yield from match.get(key, ())


def in_range(version: TorchVersion, text: str, *, unknown: bool = True) -> bool:
    """Whether a version lies in ``>=2.12,<2.14``; ``unknown`` is the answer when nobody knows."""
    mine = version.numbers()
    if not text:
        return True
    if mine is None:
        return unknown
    for sign, bound in _RANGE.findall(text):
        theirs = numbers(bound)
        cut = mine[: len(theirs)] if sign in ("==", "<=", ">") else mine
        holds = {
            ">=": mine >= theirs, "<=": cut <= theirs, "<": mine < theirs, ">": cut > theirs,
            "==": cut == theirs,
        }  # fmt: skip
        if not holds[sign]:
            return False
    return True


def findings(rules: Sequence[Rule], log: Log) -> list[Finding]:
    """Every rule that matches, for each group of failures and for the log as such."""
    found = []
    for rule in rules:
        if not in_range(log.torch, rule.versions):
            continue
        explained = False
        for group in log.failures:
            for match in rule.matches:
                if _about_a_group(match):
                    evidence = _holds(match, group, log)
                    if evidence is not None:
                        why = " ".join(match.get("why", rule.why).split())
                        depth = _depth(match, group.event, log.torch)
                        found.append(
                            Finding(rule, match["confidence"], why, group, evidence, depth=depth)
                        )
                        explained = True
                        break
        if explained:
            continue
        for match in rule.matches:
            if not _about_a_group(match):
                evidence = _holds(match, None, log)
                if evidence is not None:
                    why = " ".join(match.get("why", rule.why).split())
                    # Of a failure whose own message says it, the line is an explanation.
                    own = _saying(match, log)
                    weak = own is None and not match.keys() & set(_OF_A_STACK)
                    # What a program tells as a matter of course may be meant as it is.
                    calm = weak and all(group.event.type == "INFO" for group in evidence)
                    confidence = "low" if calm else match["confidence"]
                    found.append(Finding(rule, confidence, why, own, evidence, weak))
                    break
    return found


def _saying(match: dict[str, Any], log: Log) -> Group | None:
    """The failure whose own words are one of the lines that the match asks for."""
    for text in match.get("log", ()):
        for group in log.told.get(text, ()):
            mine = (f"{one.type}: {one.message}" for one in group.event.chain())
            if any(group is f for f in log.failures) and any(re.search(text, m) for m in mine):
                return group
    return None


def _about_a_group(match: dict[str, Any]) -> bool:
    return bool(match.keys() & _OF_A_GROUP)


def _holds(match: dict[str, Any], group: Group | None, log: Log) -> tuple[Group, ...] | None:
    """The evidence when all conditions hold, else None."""
    if "versions" in match and not in_range(log.torch, match["versions"]):
        return None
    if match.get("known") and log.torch.numbers() is None:
        return None
    evidence: list[Group] = [group] if group is not None else []
    if group is not None and not _fits(match, group, log.torch):
        return None
    for position, text in enumerate(match.get("log", ())):
        shown = _in_log(text, log, group)
        if shown is None or (position == 0 and shown.count < match.get("often", 1)):
            return None
        evidence.append(shown)
    if any(_in_log(text, log, group) is not None for text in match.get("not_log", ())):
        return None
    if match.keys() & set(_OF_A_STACK):
        holder = _in_stacks(match, log)
        if holder is None:
            return None
        evidence.append(holder)
    return tuple(evidence)


def _in_stacks(match: dict[str, Any], log: Log) -> Group | None:
    """The dump that has every stack which the match asks for."""
    wanted = [re.compile(text) for text in match.get("stacks", ())]
    unwanted = match.get("stacks_without", ())
    ends, twice, beside = match.get("stack_ends"), match.get("twice"), match.get("beside")
    for holder in (*log.dumps, *log.failures):
        shown = [
            [f"thread {stack.thread}", *(shape(f, log.torch) for f in stack.frames)]
            for stack in holder.event.stacks
            if stack.frames
        ]
        if beside and not _two_threads(wanted, ends, beside, shown):
            continue
        if wanted and not any(
            all(any(pattern.search(frame) for frame in frames) for pattern in wanted)
            and not any(re.search(text, frame) for text in unwanted for frame in frames)
            for frames in shown
        ):
            continue
        if ends and not any(re.search(ends, frames[-1]) for frames in shown):
            continue
        if twice and not any(
            sum(bool(re.search(twice, frame)) for frame in frames) > 1 for frames in shown
        ):
            continue
        if shown:
            return holder
    return None


def _two_threads(
    wanted: list[re.Pattern[str]], ends: str | None, beside: list[str], shown: list[list[str]]
) -> bool:
    """Whether one thread has what is wanted, and another one what stands beside it."""
    ones = [
        index
        for index, frames in enumerate(shown)
        if all(any(pattern.search(frame) for frame in frames) for pattern in wanted)
        and (not ends or re.search(ends, frames[-1]))
    ]
    others = [
        index
        for index, frames in enumerate(shown)
        if all(any(re.search(text, frame) for frame in frames) for text in beside)
    ]
    return any(one != other for one in ones for other in others)


def _fits(match: dict[str, Any], group: Group, torch: TorchVersion) -> bool:
    event = group.event
    if event.kind not in match.get("kind", _ORDINARY):
        return False
    if match.get("headless") and event.type:
        return False
    if "context" in match and not re.search(match["context"], event.context):
        return False
    each = max(max(group.speakers.values(), default=0), group.count // max(1, len(group.speakers)))
    if len(group.speakers) < match.get("threads", 0) or each < match.get("repeats", 0):
        return False
    return _depth(match, event, torch) >= 0


def _depth(match: dict[str, Any], event: Event, torch: TorchVersion) -> int:
    """Which exception of the chain fits, the one that came first if several do; -1: none."""
    fits = (_exception_fits(match, one, event, torch) for one in event.chain())
    return max((index for index, one in enumerate(fits) if one), default=-1)


def _exception_fits(match: dict[str, Any], one: Event, outer: Event, torch: TorchVersion) -> bool:
    if "type" in match and not re.search(match["type"], one.type):
        return False
    if "message" in match and not re.search(match["message"], one.message):
        return False
    if "not_message" in match and re.search(match["not_message"], one.message):
        return False
    frames = one.frames if one.frames else outer.frames
    if "source" in match and not (frames and re.search(match["source"], frames[-1].source)):
        return False
    begun = frames and frames[0].function in _STARTS and not one.details.get("cut")
    if match.get("from_start") and not begun:
        return False
    shown = [shape(frame, torch) for frame in frames]
    if "ends_in" in match and not (shown and re.search(match["ends_in"], shown[-1])):
        return False
    every = shown if one is outer else shown + [shape(f, torch) for f in outer.frames]
    if not all(any(re.search(text, frame) for frame in every) for text in match.get("frames", ())):
        return False
    return not any(re.search(text, frame) for text in match.get("without", ()) for frame in every)


@lru_cache(maxsize=1 << 16)
def shape(frame: Frame, torch: TorchVersion) -> str:
    """``torch/_dynamo/eval_frame.py:compile_wrapper=F``, the form that rules are written for."""
    act = role(frame, torch).act
    return f"{frame.file}:{frame.function}={act or '?'}"


def _in_log(text: str, log: Log, but: Group | None) -> Group | None:
    """A line, or another failure's message or type, in which ``text`` is found."""
    if text not in log.told:
        log.told[text] = _telling(re.compile(text), log)
    told = log.told[text]
    if but is not None and told and told[0] is but:
        told = told[1:]
    if told:
        return told[0]
    return but if but is not None and re.search(text, but.event.context) else None


def _telling(pattern: re.Pattern[str], log: Log) -> list[Group]:
    """The groups that tell it, at most two: the line that was said most often, then failures."""
    said = [group for group in log.notices if pattern.search(group.event.message)]
    told = [max(said, key=lambda group: group.count)] if said else []
    for group in log.failures:
        if len(told) > 1:
            break
        if any(
            pattern.search(f"{one.type}: {one.message}") or pattern.search(one.context)
            for one in group.event.chain()
        ):
            told.append(group)
    return told + [group for group in log.dumps if pattern.search(group.event.type)][:1]
