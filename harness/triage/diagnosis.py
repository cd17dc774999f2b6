"""From what was collected to an answer: which torch, who died, of what, and what to do next.

A diagnosis is a function of the text. Where no rule fits it says "unknown" and shows the nearest
evidence; it does not guess. What the text cannot tell is said too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from harness.triage import roles, rules
from harness.triage.collect import Collector, Group, Speaker
from harness.triage.events import FAILURES, Event, Frame, Kind, Place
from harness.triage.roles import TorchVersion
from harness.triage.source import Act
from harness.triage.structured import Trace
from harness.triage.telling import expression
from harness.triage.words import passed_over

SCHEMA = 1
UNKNOWN_ID = "unknown"
_RANKS = {name: index for index, name in enumerate(rules.CONFIDENCES)}
# A speaker is called silent after this many of its usual intervals without a line.
SILENT_INTERVALS = 6
SILENT_BYTES = 2000
SHOWN = 12


@dataclass(frozen=True)
class Cause:
    """One answer.

    Attributes:
        id: as in `tests/triage/causes.toml`; "unknown" when no rule fits.
        confidence: "high", "medium" or "low".
        failures: indices into `Diagnosis.failures` that it explains.
        evidence: where in the input one can see it.
        secondary: whether it follows from another cause of the list.
        alternative: whether another cause of the list explains the same failures better.
    """

    id: str
    confidence: str
    title: str
    why: str
    state: str = ""
    versions: str = ""
    fix: str = ""
    workarounds: tuple[str, ...] = ()
    guard: str = ""
    references: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    failures: tuple[int, ...] = ()
    evidence: tuple[Place, ...] = ()
    secondary: bool = False
    alternative: bool = False


@dataclass(frozen=True)
class Fate:
    """What the log shows of one speaker: "died", "alive" or "silent", and since when."""

    who: str
    state: str
    last: Place
    time: str | None
    text: str


@dataclass
class Diagnosis:
    """The whole answer. `to_json` is the stable form (docs/triage.md).

    Attributes:
        grep: the pattern of the search, equal for all logs.
        grep_found: a short one for what was found in this one; "" where nothing was.
    """

    inputs: tuple[str, ...]
    torch: TorchVersion
    failures: list[Group]
    handled: list[Group]
    dumps: list[Group]
    causes: list[Cause]
    fates: list[Fate]
    unsaid: list[str]
    next: list[str]
    grep: str
    grep_found: str
    lines: int
    last_time: str | None = None
    trace: dict[str, Any] = field(default_factory=dict)
    overflow: int = 0

    @property
    def seconds_after(self) -> float | None:
        """How long the log goes on after the first failure; None when it does not say."""
        first = next((group.first_time for group in self.failures if group.first_time), None)
        return _seconds_between(first, self.last_time)

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 found."""
        return 1 if self.failures or self.causes else 0

    def cause_of(self, index: int) -> Cause | None:
        """The first cause that explains a failure."""
        return next((cause for cause in self.causes if index in cause.failures), None)

    def frames_of(self, event: Event) -> list[tuple[Frame, roles.Role]]:
        """The frames of one exception with their roles, outermost first."""
        whole = event.kind is Kind.EXCEPTION and bool(event.type)
        last = len(event.frames) - 1
        return [
            (frame, roles.role(frame, self.torch, last=(i == last) if whole else None))
            for i, frame in enumerate(event.frames)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data; the key `schema` names the form."""
        from harness.triage.output import as_json

        return as_json(self)


def diagnose(
    collector: Collector, inputs: Sequence[str], grep: str, trace: Trace | None = None
) -> Diagnosis:
    """Judges what was collected."""
    groups = _without_echoes([group for group in collector.groups.values() if group is not None])
    dumps = [group for group in groups if group.event.kind is Kind.STACKS]
    failed = [group for group in groups if group.event.kind in FAILURES]
    for group in failed:  # what a program dealt with is followed by more of the program
        went_on = collector.went_on.get(group.last.name, -1) > group.last.offset
        went_on = went_on or passed_over(group.event.context)
        group.event.handled = group.event.handled and went_on
    failures = _in_order([group for group in failed if not group.event.handled])
    told = [group for group in failures if group.event.kind is not Kind.ERROR]
    failures = told or failures
    handled = _in_order([group for group in failed if group.event.handled])
    # Of what is left out of the failures too: a launcher's frames tell the version as well.
    seen = (group for group in collector.groups.values() if group is not None)
    frames = [*_frames((*failures, *dumps, *handled, *seen)), *collector.logged]
    torch = roles.infer(frames, list(collector.stated_torch))
    log = rules.Log(torch, failures, list(collector.notices.values()), dumps)
    findings = rules.findings(rules.load(), log)
    causes = _causes(findings, failures)
    said = {cause.id for cause in causes if not cause.alternative}
    shown = [finding for finding in findings if finding.rule.id in said]
    diagnosis = Diagnosis(
        tuple(inputs), torch, failures, handled, dumps, causes, _fates(collector, failures), [], [],
        grep, expression(failures, shown), collector.lines, collector.last_time,
        trace.to_json(failures) if trace else {}, collector.overflow,
    )  # fmt: skip
    diagnosis.unsaid = list(_unsaid(diagnosis))
    diagnosis.next = list(_next(diagnosis))
    return diagnosis


def _frames(groups: Iterable[Group]) -> Iterable[Frame]:
    for group in groups:
        for event in group.event.chain():
            yield from event.frames
        for stack in group.event.stacks:
            yield from stack.frames


def _without_echoes(groups: list[Group]) -> list[Group]:
    """Takes out statements of an exception whose traceback is there too.

    A program that logs ``worker died: KeyError: 'custom'`` beside the traceback has failed once.
    """
    told: dict[tuple[str, str], Group] = {}
    for group in groups:
        if group.event.frames and group.event.kind is Kind.EXCEPTION:
            for event in group.event.chain():
                told.setdefault((event.short_type, _first_line(event.message)), group)
    kept = []
    for group in groups:
        event = group.event
        if _passed_on(group, groups):
            continue
        if event.kind is Kind.EXCEPTION and not event.frames:
            teller = told.get((event.short_type, _first_line(event.message)))
            if teller is not None:
                teller.count = max(teller.count, group.count)
                for who, count in group.speakers.items():
                    if who[0] is not None and who[0] not in teller.threads:
                        teller.speakers.pop((None, None), None)
                        teller.speakers.setdefault(who, count)
                continue
        kept.append(group)
    return kept


# How launchers end when one of their processes has failed.
_LAUNCHERS = {"ChildFailedError", "ProcessRaisedException", "ProcessExitedException"}
_LAUNCHERS_FILES = ("accelerate/commands/", "deepspeed/launcher/", "torch/distributed/launcher/")


def _passed_on(group: Group, groups: Sequence[Group]) -> bool:
    """Whether an exception only hands on others that the text tells too.

    An exception group stands before its members, a launcher's exception behind its process's.
    """
    event = group.event
    others = (
        other
        for other in groups
        if other is not group
        and other.event.kind in FAILURES - {Kind.ERROR}
        and not _of_a_launcher(other.event)
        and not other.event.handled
    )
    if event.details.get("members"):
        return any(other.last.offset > group.first.offset for other in others)
    if event.short_type == "ProcessRaisedException":  # the process's own stands in its message
        return any(True for _ in others)
    if _of_a_launcher(event):
        return any(
            other.first.name != group.first.name or other.first.offset < group.first.offset
            for other in others
        )
    return False


def _of_a_launcher(event: Event) -> bool:
    if event.short_type == "CalledProcessError":
        return any(frame.file.startswith(_LAUNCHERS_FILES) for frame in event.frames)
    return event.short_type in _LAUNCHERS


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()[:160]


def _in_order(groups: list[Group]) -> list[Group]:
    """By time where every group has one of the same form, else as they stand in the input."""
    times = [group.first_time for group in groups]
    forms = {len(time.split()) * 100 + len(time.split()[-1]) for time in times if time}
    if all(times) and len(forms) == 1 and len({g.first.name for g in groups}) > 1:
        return sorted(groups, key=lambda group: (group.first_time or "", group.first.offset))
    names = list(dict.fromkeys(group.first.name for group in groups))
    return sorted(groups, key=lambda group: (names.index(group.first.name), group.first.offset))


def _causes(findings: Sequence[rules.Finding], failures: Sequence[Group]) -> list[Cause]:
    """One cause per rule; each failure counts for the best rule that explains it."""
    index = {id(group): i for i, group in enumerate(failures)}
    best: dict[int, rules.Finding] = {}
    for finding in findings:
        if finding.group is None:
            continue
        at = index[id(finding.group)]
        if at not in best or _weight(finding) < _weight(best[at]):
            best[at] = finding
    primary = any(not f.rule.secondary for f in [*best.values(), *findings])
    killed = any(_killed(failures[i]) for i in best)
    by_rule: dict[str, list[tuple[rules.Finding, bool]]] = {}
    for finding in findings:
        chosen = finding.group is None or best[index[id(finding.group)]] is finding
        by_rule.setdefault(finding.rule.id, []).append((finding, chosen))
    causes = []
    for entries in by_rule.values():
        chosen_ones = [finding for finding, chosen in entries if chosen]
        top = min(chosen_ones or [entries[0][0]], key=_weight)
        rule = top.rule
        about = [f.group for f in chosen_ones or [top] if f.group is not None]
        follows = rule.secondary and (primary or (killed and not any(map(_killed, about))))
        confidence = top.confidence
        if not chosen_ones or follows:
            confidence = "low"
        shown = chosen_ones or [top]
        causes.append(
            Cause(
                rule.id, confidence, rule.title, top.why, rule.state, rule.versions, rule.fix,
                rule.workarounds, rule.guard, rule.references, rule.next,
                tuple(index[id(f.group)] for f in shown if f.group is not None),
                tuple(dict.fromkeys(g.first for f in shown for g in f.evidence))[:SHOWN],
                follows,
                not chosen_ones,
            )
        )  # fmt: skip
    causes.sort(
        key=lambda cause: (
            cause.alternative,
            cause.secondary,
            _RANKS[cause.confidence],
            min(cause.failures, default=len(failures)),
        )
    )
    if failures and not causes:
        return [_unknown(failures, range(len(failures)))]
    unexplained = [
        i for i, g in enumerate(failures)
        if i not in best and not _asked_for(g) and g.event.kind is not Kind.ERROR
    ]  # fmt: skip
    if unexplained and not best and all(f.weak for f in findings):
        # What lines say beside a failure is no explanation of it.
        lowered = [replace(cause, confidence="low") for cause in causes]
        return [_unknown(failures, unexplained), *lowered]
    if unexplained and best and not primary and not killed and unexplained[0] < min(best):
        followed = [replace(cause, confidence="low", secondary=True) for cause in causes]
        return [_unknown(failures, unexplained), *followed]
    return causes


def _killed(group: Group) -> bool:
    """Whether the kernel or the launcher says that a process was killed first.

    Its peers time out or lose it, and tell so before the launcher tells the kill.
    """
    event = group.event
    first = event.details.keys() & {"by", "exit_code", "exitcode"}
    return event.type == "SIGKILL" and bool(first)


def _asked_for(group: Group) -> bool:
    """Whether somebody ended the program on purpose."""
    return group.event.short_type in ("KeyboardInterrupt", "SystemExit", "SIGINT")


def _weight(finding: rules.Finding) -> tuple[bool, int, int, int]:
    """Small is better: primary, sure, about what was raised first, and with more evidence."""
    sure = _RANKS[finding.confidence]
    return finding.rule.secondary, sure, -finding.depth, -len(finding.evidence)


def _unknown(failures: Sequence[Group], which: Sequence[int]) -> Cause:
    nearest = failures[which[0]].event
    where = nearest.frames[-1].short() if nearest.frames else ""
    what = f"{nearest.type}: {_first_line(nearest.message)}" if nearest.type else "frames only"
    why = f"no rule fits; the first failure is {what}" + (f", at {where}" if where else "")
    return Cause(
        UNKNOWN_ID, "low", "Unknown", why, failures=tuple(which),
        evidence=tuple(failures[i].first for i in which[:SHOWN]),
    )  # fmt: skip


def _fates(collector: Collector, failures: Sequence[Group]) -> list[Fate]:
    """What became of each speaker, in the order in which they fell silent."""
    if not collector.speakers:
        return []
    ends: dict[str, int] = {}
    for speaker in collector.speakers.values():
        ends[speaker.last.name] = max(ends.get(speaker.last.name, 0), speaker.last.offset)
    exits = [group for group in collector.notices.values() if "exit_code" in group.event.details]
    fates = [
        Fate(s.name, _state(s, failures, ends[s.last.name], exits), s.last, s.time, s.text)
        for s in collector.speakers.values()
    ]
    return sorted(fates, key=lambda fate: (fate.last.name, fate.last.offset))


def _state(speaker: Speaker, failures: Sequence[Group], end: int, exits: Sequence[Group]) -> str:
    mine = [group for group in failures if speaker.name in _names(group)]
    for told in exits:  # by the launcher, of a rank that said nothing more
        here = told.last.name == speaker.last.name and told.last.offset >= speaker.last.offset
        if here and any(f"{speaker.name} ".startswith(f"rank {rank} ") for rank in told.ranks):
            return "died"
    quiet = end - speaker.last.offset
    usual = (speaker.last.offset - speaker.first.offset) / max(1, speaker.lines - 1)
    if mine and quiet >= 0:
        last = max(group.last.offset for group in mine)
        # Its own last words stand at the failure; a line well after it means that it lives.
        return "died" if speaker.last.offset - last < 20_000 else "alive"
    return "silent" if quiet > max(SILENT_BYTES, SILENT_INTERVALS * usual) else "alive"


def _names(group: Group) -> set[str]:
    """The speakers' names (:class:`Speaker`) that a group is about."""
    names: set[str] = set()
    for who, rank in group.speakers:
        said = f"rank {rank}" if rank and rank.isdigit() else rank
        thread = None if who is None or who == f"rank{rank}" or who == rank else who
        names |= {" ".join(part for part in (said, thread) if part), thread or said or ""}
    return names - {""}


def _seconds_between(first: str | None, last: str | None) -> float | None:
    """Seconds from one time of the log to another; None when they cannot be compared."""
    moments = []
    for text in (first, last):
        if text is None:
            return None
        try:
            moment = datetime.fromisoformat(text.replace(",", ".").replace("/", "-"))
        except ValueError:
            return None
        moments.append(moment.replace(tzinfo=None))
    return (moments[1] - moments[0]).total_seconds()


def _unsaid(diagnosis: Diagnosis) -> Iterable[str]:
    """What the text cannot tell."""
    failures, torch = diagnosis.failures, diagnosis.torch
    loose = [group for group in failures if group.event.kind is Kind.FRAMES]
    if loose:
        acts = {
            role.act for group in loose for _, role in diagnosis.frames_of(group.event)
            if role.act is not None
        }  # fmt: skip
        if acts and acts <= {Act.THROUGH, Act.CALL}:
            yield (
                "the raise itself: every frame shown passed a call through, none of them raised;"
                " the exception and the innermost frame are not in the text"
            )
        else:
            yield "the exception of loose frames: its type and message are not in the text"
    if torch.version is None and any(frame.of_torch for frame in _frames(failures)):
        yield f"the torch version ({torch.why})"
    elif torch.how == "inferred":
        yield f"the torch version is inferred, not stated ({torch.why})"
    if torch.conflict:
        yield torch.conflict
    if any(not group.threads and not group.ranks for group in failures):
        yield "which thread or rank failed: the text does not name it"
    shared = [cause for cause in diagnosis.causes if cause.state and not cause.secondary]
    if shared and not diagnosis.dumps:
        yield "which thread held the shared state at that moment: torch does not log it"
    if diagnosis.overflow:
        yield f"{diagnosis.overflow} further different failures were counted, not kept"


def _next(diagnosis: Diagnosis) -> Iterable[str]:
    """Commands that would tell it, most useful first."""
    seen: set[str] = set()
    said: list[str] = []
    name = shlex.quote(next((i for i in diagnosis.inputs if i != "-"), "train.log"))
    if any(group.event.kind is Kind.FRAMES for group in diagnosis.failures):
        said.append(
            f"grep -n -B3 -A80 -E 'Traceback|Exception in thread' {name}   # the whole tracebacks,"
            " with the thread's name and the last line"
        )
    if diagnosis.torch.how != "stated" and diagnosis.failures:
        said.append(
            "python -c 'import torch; print(torch.__version__)'   # on the machine of the run"
        )
    for cause in diagnosis.causes:
        if not (cause.secondary or cause.alternative):
            said.extend(cause.next)
    if any(fate.state == "silent" for fate in diagnosis.fates) and not diagnosis.dumps:
        said.append("py-spy dump --pid PID   # of a rank that is silent and still there")
    if diagnosis.causes and diagnosis.causes[0].id == UNKNOWN_ID and not diagnosis.dumps:
        said.append("py-spy dump --pid PID   # if the process is still there")
    for line in said:
        if line not in seen:
            seen.add(line)
            yield line
