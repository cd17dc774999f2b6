"""Who did it: victim and culprit of each failure, and whether the run is clean without them.

:func:`explain` names, from a record alone, for each victim the thread that last wrote the state
that killed it, where that thread stood, and how long the two overlapped. That is a coincidence
until :func:`counterfactual` has run the same program again with the two steps swapped, and with a
lock round the region: if both are clean every time, the overlap was the cause.

Not covered: states without a hook point at their writes (their last writer is unknown), and
failures in processes that died with their record.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.capture import shorten
from harness.points import Event
from harness.schedule import Step
from harness.verdict import Record, Verdict, exposures, judge

if TYPE_CHECKING:
    from harness.isolate import Isolation

VARIABLE = "RACE_CHANGE"  # how a changed run reaches the trial inside an isolated process
_LOCK_PATIENCE = 60.0  # seconds; a lock that cannot be had makes the changed run no evidence

# Words in an exception's text -> the state that it is about, where no holder was seen.
_ABOUT = (
    ("FX to symbolically trace", "fx-tracing-flag"),
    ("CURRENT_PATCHER", "fx-patcher"),
    ("not installed as a submodule", "module-call"),
    ("Metric(s)", "metrics-context"),
    ("'custom'", "traceback-meta"),
    ("found no compiled frames", "fullgraph-frames"),
    ("_EXPORT_MODULE_HIERARCHY", "export-hierarchy"),
)


# -- who, from the record --------------------------------------------------------------------------


def explain(record: Record) -> list[dict[str, Any]]:
    """One entry per failure: victim, what happened, state, culprit, stacks, the overlap.

    ``written`` is the culprit's stack at its last write of the state (at the hook point
    ``point``), ``stack`` where it was at the moment of the failure. Values that the record does
    not tell are None; ``text`` says all of it in one sentence.
    """
    entries = [*_of_threads(record), *_of_states(record)]
    for entry in entries:
        entry["text"] = _sentence(entry)
    return entries


def lines(record: Record) -> list[str]:
    """The sentences of :func:`explain`, for a report or a terminal."""
    return [entry["text"] for entry in record.get("cause", ()) or explain(record)]


def _of_threads(record: Record) -> Iterator[dict[str, Any]]:
    watch = record.get("watch", {})
    eager = {thread for thread, count in watch.get("eager_flex", {}).items() if count}
    for outcome in record.get("outcomes", ()):
        thread = outcome["thread"]
        if outcome["state"] == "raised":
            error = outcome["error"]
            first = next(iter(error["message"].splitlines()), "")
            what = f"died of {error['type'].rpartition('.')[2]}: {first[:100]}"
        elif outcome["state"] == "unfinished":
            what = "had not ended at the deadline"
        elif thread in eager:
            what = "ran flex_attention uncompiled"
        else:
            continue
        yield _entry(record, thread, what, outcome)


def _entry(record: Record, victim: str, what: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    watch = record.get("watch", {})
    entry: dict[str, Any] = dict.fromkeys(
        ("state", "culprit", "culprit_step", "point", "stack", "written", "overlap")
    )
    entry |= {"victim": victim, "what": what}
    if outcome["state"] == "unfinished":
        owner = watch.get("lock_owner")
        if victim in watch.get("lock_waiters", ()) and owner is not None:
            entry |= {"state": "compile-lock", "culprit": owner}
    elif (holder := watch.get("holders", {}).get(victim)) is not None:
        entry |= {
            "state": holder["state"],
            "culprit": holder["thread"],
            "culprit_step": holder.get("step"),
            "stack": holder.get("stack") or None,
            "overlap": _overlap(holder),
        }
        if (write := holder.get("write")) is not None:
            entry |= {"point": write["point"], "written": write["stack"]}
    elif outcome["state"] == "raised":
        message = f"{outcome['error']['type']} {outcome['error']['message']}"
        entry["state"] = next((state for words, state in _ABOUT if words in message), None)
    if entry["state"] is not None and entry["point"] is None:
        _add_writer(entry, watch, before=(entry["overlap"] or {}).get("failed"))
    return entry


def _of_states(record: Record) -> Iterator[dict[str, Any]]:
    for row in record.get("probes", ()):
        if row["at_rest"] is not False:
            continue
        entry: dict[str, Any] = dict.fromkeys(
            ("victim", "culprit", "culprit_step", "point", "stack", "written", "overlap")
        )
        entry |= {"what": f"stays {row['value']}, at rest {row['rest']}", "state": row["probe"]}
        _add_writer(entry, record.get("watch", {}), before=None)
        yield entry


def _add_writer(entry: dict[str, Any], watch: Mapping[str, Any], *, before: float | None) -> None:
    """The last write of the state by somebody else, up to the moment of the failure."""
    writes = [
        write
        for write in watch.get("writes", {}).get(entry["state"], ())
        if write["thread"] != entry["victim"]
        and entry["culprit"] in (None, write["thread"])
        and (before is None or write["t"] <= before)
    ]
    if not writes:
        return
    last = max(writes, key=lambda write: write["t"])
    entry["culprit"] = last["thread"]
    entry["point"] = last["point"]
    entry["culprit_step"] = last["step"] if entry["culprit_step"] is None else entry["culprit_step"]
    entry["written"] = last["stack"] or None


def _overlap(holder: Mapping[str, Any]) -> dict[str, float | None] | None:
    """When both were inside, on the trial's clock; None when one of the times is unknown."""
    since, victim_since, failed = (
        holder.get(name) for name in ("since", "victim_since", "failed_at")
    )
    if since is None or victim_since is None or failed is None:
        return None
    begin = max(since, victim_since)
    until = holder.get("until")
    end = failed if until is None else min(until, failed)
    seconds = round(max(0.0, end - begin), 6)
    return {"begin": begin, "end": max(begin, end), "seconds": seconds, "failed": failed}


def _sentence(entry: Mapping[str, Any]) -> str:
    subject = entry["victim"] if entry["victim"] is not None else entry["state"]
    text = f"{subject} {entry['what']}"
    if entry["culprit"] is None:
        where = f" ({entry['state']})" if entry["state"] and entry["victim"] else ""
        return f"{text}{where}; who wrote the state last is not known"
    step = "" if entry["culprit_step"] is None else f" in its step {entry['culprit_step']}"
    if entry["state"] == "compile-lock":
        return f"{text}: it waits for the compile lock, which {entry['culprit']} holds"
    text += f"; {entry['state']} was written last by {entry['culprit']}{step}"
    if entry["point"] is not None:
        text += f", at {entry['point']}"
    if where := entry["written"] or entry["stack"]:
        top = _telling(where)
        text += f", {shorten(top['file'])}:{top['line']} {top['function']}"
    if entry["overlap"] is not None:
        overlap = entry["overlap"]
        text += (
            f"; both were inside for {1000 * overlap['seconds']:.1f} ms, "
            f"from {overlap['begin']:.4f} s to {overlap['end']:.4f} s"
        )
    return text


def _telling(stack: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The innermost frame that is torch's or the user's: the harness's own say nothing."""
    own = ("/harness/", "/threading.py", "/contextlib.py")
    return next((f for f in reversed(stack) if not any(o in f["file"] for o in own)), stack[-1])


# -- the same run, changed -------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What is different in a changed run.

    Attributes:
        steps: the script to follow instead of the program's own; empty for a free run.
        lock: whether one lock is round every compiled call, trace and annotation.
    """

    steps: tuple[str, ...]
    lock: bool = False


def change_from(environment: Mapping[str, str]) -> Change | None:
    """The change that this process's trial is to make, or None."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    data = json.loads(text)
    return Change(tuple(data["steps"]), bool(data["lock"]))


class Region:
    """One reentrant lock round every compiled call, FX trace and annotation, by hook points.

    ``arrive`` must be the first of a trial's listeners and ``leave`` the last, so that whoever
    records sees nobody inside who does not hold the lock.
    """

    _ENTER = ("call.arrive", "trace.begin", "annotate.arrive")
    _LEAVE = ("call.exit", "trace.left", "annotate.left")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = threading.local()
        self.failed: str | None = None

    def arrive(self, event: Event) -> None:
        """Takes the lock before the thread enters; gives up, and says so, after a minute."""
        if event.point not in self._ENTER:
            return
        if self._lock.acquire(timeout=_LOCK_PATIENCE):
            self._held.depth = getattr(self._held, "depth", 0) + 1
        else:
            self.failed = f"{event.thread} could not have the region's lock at {event.point}"

    def leave(self, event: Event) -> None:
        """Gives the lock back when the thread has left what it took it for."""
        if event.point in self._LEAVE and getattr(self._held, "depth", 0) > 0:
            self._held.depth -= 1
            self._lock.release()


@dataclass(frozen=True)
class Count:
    """How a number of runs ended.

    Attributes:
        runs: how many there were.
        failed: how many of them did not complete.
        missed: how many did not follow their script, and so show nothing.
        verdicts: verdict -> number.
    """

    runs: int
    failed: int
    missed: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        missed = f" ({self.missed} missed their script)" if self.missed else ""
        return f"{self.failed} of {self.runs}{missed}"

    @property
    def clean(self) -> bool:
        """Whether nothing failed and every run showed something."""
        return self.runs > 0 and self.failed == 0 and self.missed == 0


@dataclass(frozen=True)
class Counterfactual:
    """The run as it is, with the two steps swapped, and with a lock round the region.

    Attributes:
        as_it_is: of the program unchanged.
        swapped: None where there is no script, and so nothing to swap.
        locked: with the lock.
        causes: sentences of :func:`explain`, of the first run that failed.
        met: exposures in the runs with the lock; not 0 means that the lock was not round it all.
    """

    as_it_is: Count
    swapped: Count | None
    locked: Count
    causes: tuple[str, ...] = ()
    met: int = 0

    @property
    def shown(self) -> bool:
        """Whether the overlap is the cause: it always fails, and never without the overlap."""
        others = [count for count in (self.swapped, self.locked) if count is not None]
        fails = self.as_it_is.failed == self.as_it_is.runs > 0 and self.as_it_is.missed == 0
        return fails and self.met == 0 and all(count.clean for count in others)

    def lines(self) -> list[str]:
        """For a terminal: the causes, the three counts, and what a clean count is worth."""
        swapped = "no script to swap" if self.swapped is None else str(self.swapped)
        clean = self.locked if self.swapped is None else self.swapped
        return [
            *self.causes,
            f"as it is {self.as_it_is}; swapped {swapped}; with a lock {self.locked}",
            f"bound: {bound(clean.failed, clean.runs)}",
        ]


def bound(failed: int, runs: int) -> str:
    """What ``failed`` of ``runs`` says about the rate: the upper end, with 95 % confidence.

    For none it is exact (``1 - 0.05 ** (1 / runs)``); for some, found by halving on the same
    binomial tail.

    Raises:
        ValueError: not 0 <= failed <= runs with at least one run.
    """
    if not 0 <= failed <= runs or runs < 1:
        raise ValueError(f"{failed} of {runs} runs is not a count")
    return f"{failed} of {runs}: with 95 % confidence below {100 * _upper(failed, runs):.2g} %"


def _upper(failed: int, runs: int) -> float:
    from math import comb

    low, high = failed / runs, 1.0
    if failed == runs:
        return 1.0
    for _ in range(60):
        rate = (low + high) / 2
        tail = sum(comb(runs, k) * rate**k * (1 - rate) ** (runs - k) for k in range(failed + 1))
        low, high = (rate, high) if tail > 0.05 else (low, rate)
    return high


def swap(steps: Sequence[str], victim: str, culprit: str) -> list[str]:
    """A script in which ``victim`` is done with its part before ``culprit`` begins.

    The window is from the first point of the two that is not a work step to the last one; in it,
    what the culprit does comes after everybody else, and it is held before its trace, not in it.

    Raises:
        ValueError: the script does not name both threads inside something.
    """
    parsed = [Step.parse(line) for line in steps]
    inside = [
        index
        for index, step in enumerate(parsed)
        if step.role in (victim, culprit) and not step.point.startswith("step.")
    ]
    if not {victim, culprit} <= {parsed[index].role for index in inside}:
        raise ValueError(f"the script does not have {victim} and {culprit} inside anything")
    window = parsed[inside[0] : inside[-1] + 1]
    last = [step for step in window if step.role == culprit]
    first = [step for step in window if step.role != culprit]
    changed = [*first, *_ends(first, victim), *_begins(last), *last]
    result = [*parsed[: inside[0]], *changed, *parsed[inside[-1] + 1 :]]
    return [str(step) for step in dict.fromkeys(result)]


def _ends(steps: Sequence[Step], victim: str) -> list[Step]:
    """The victim has left what it was inside; added where the script does not say so."""
    own = [step for step in steps if step.role == victim]
    group = own[-1].point.partition(".")[0] if own else ""
    point = {"call": "call.exit", "trace": "trace.left", "annotate": "annotate.left"}.get(group)
    return [Step(victim, point, own[-1].step)] if point is not None else []


def _begins(steps: Sequence[Step]) -> list[Step]:
    """A place before the culprit's state is up, where it is held: it must not have begun."""
    head = steps[0]
    begin = {"trace": "trace.begin", "annotate": "annotate.arrive"}.get(head.point.split(".")[0])
    if begin is not None and head.point != begin:
        return [Step(head.role, begin, head.step, head.nth)]
    return []


def counterfactual(
    case: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    isolation: Isolation,
    runs: int = 20,
    deadline: float = 120.0,
) -> Counterfactual:
    """Runs ``case`` as it is, swapped, and with a lock, ``runs`` times each.

    Args:
        case: module-level function that returns a trial's record (:mod:`harness.isolate`).
        arguments: its arguments, plain data.
        isolation: where it runs; each run is a process of its own.
        runs: of each kind, at least 1.
        deadline: seconds for one run.

    Raises:
        ValueError: runs below 1, or nothing fails, so that there is no cause to look for.
        harness.isolate.IsolationError: the case cannot be run.
    """
    if runs < 1:
        raise ValueError(f"a counterfactual needs at least 1 run of each kind, not {runs}")

    def once(change: Change | None) -> Record:
        with _changed(change):
            return isolation.run(case, arguments, deadline=deadline).record()

    as_it_is = [once(None) for _ in range(runs)]
    failed = next((r for r in as_it_is if judge(r) is not Verdict.COMPLETED), None)
    if failed is None:
        raise ValueError(f"nothing fails: {bound(0, runs)}, so there is no cause to look for")
    found = failed.get("cause") or explain(failed)
    steps = failed.get("script", {}).get("steps", [])
    swapped_steps = _swapped_steps(steps, found)
    swapped = None
    if swapped_steps is not None:
        swapped = _count([once(Change(tuple(swapped_steps))) for _ in range(runs)])
    # Inside the region the old order is what the lock forbids: only work steps are kept.
    outside = [line for line in steps if Step.parse(line).point.startswith("step.")]
    locked = [once(Change(tuple(outside), lock=True)) for _ in range(runs)]
    return Counterfactual(
        _count(as_it_is),
        swapped,
        _count(locked),
        tuple(entry["text"] for entry in found),
        sum(exposures(record, kind) for record in locked for kind in ("fx-trace", "annotation")),
    )


def _swapped_steps(steps: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str] | None:
    for entry in found:
        if entry["victim"] is None or entry["culprit"] is None:
            continue
        try:
            return swap(steps, entry["victim"], entry["culprit"])
        except ValueError:
            continue
    return None


def _count(records: Sequence[Record]) -> Count:
    verdicts = Counter(str(judge(record)) for record in records)
    missed = sum(record.get("script", {}).get("missed") is not None for record in records)
    failed = len(records) - verdicts[str(Verdict.COMPLETED)]
    return Count(len(records), failed, missed, dict(verdicts))


@contextmanager
def _changed(change: Change | None) -> Iterator[None]:
    """The isolated process takes its environment from this one."""
    if change is None:
        yield
        return
    old = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps({"steps": list(change.steps), "lock": change.lock})
    try:
        yield
    finally:
        if old is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = old
