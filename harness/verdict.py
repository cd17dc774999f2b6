"""In which of eight ways did a compile race show? One word per trial, and every finding behind it.

The verdict is a function of the record alone (:mod:`harness.trial` makes records), so it can be
judged again from a report. Order of severity, worst first: a trial gets the first that applies.

============================  =====================================================================
native crash                  the process died by a signal, or ended without a result
deadlock                      a thread, or the process, had not ended at the deadline
raised                        a thread ended with an exception
silently eager                no exception, but an uncompiled path ran, or a fresh compile captures
                              nothing
spurious recompile            more (or fewer) compiles than planned, a valid cache entry that was
                              missed, a false "found no compiled frames"
sticky state                  everybody stopped, and a probe is not at rest or a canary fails
wrong number                  a result differs from the single-threaded reference
completed                     none of the above
============================  =====================================================================

An exception by which torch itself says that it has recompiled without a reason is a spurious
recompile, not "raised".

``harness error`` stands outside: the trial did not show what it was meant to show (its script was
missed, no exposure, an unexpected failure in a control). It is never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Record = Mapping[str, Any]
EXPOSURES = ("fx-trace", "annotation")  # kinds of another thread's state that a watch counts


class Verdict(StrEnum):
    """How a trial ended; the value is what tables and reports print."""

    NATIVE_CRASH = "native crash"
    DEADLOCK = "deadlock"
    RAISED = "raised"
    SILENTLY_EAGER = "silently eager"
    SPURIOUS_RECOMPILE = "spurious recompile"
    STICKY_STATE = "sticky state"
    WRONG_NUMBER = "wrong number"
    COMPLETED = "completed"
    HARNESS_ERROR = "harness error"


@dataclass(frozen=True)
class Finding:
    """One thing that a detector saw."""

    verdict: Verdict
    what: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.what}"


@dataclass(frozen=True)
class Detector:
    """One way to see that something went wrong.

    Attributes:
        name: short and stable.
        verdict: the word that its findings stand for.
        find: what it sees in a record, a line each.
    """

    name: str
    verdict: Verdict
    find: Callable[[Record], Iterator[str]]


def _process_died(record: Record) -> Iterator[str]:
    process = record.get("process", {})
    if process.get("ended") in ("signal", "exit"):
        yield process["what"]


def _process_hung(record: Record) -> Iterator[str]:
    process = record.get("process", {})
    if process.get("ended") == "hang":
        yield process["what"]


def _thread_stuck(record: Record) -> Iterator[str]:
    watch = record.get("watch", {})
    owner, waiters = watch.get("lock_owner"), watch.get("lock_waiters", ())
    for outcome in record.get("outcomes", ()):
        if outcome["state"] == "unfinished":
            where = outcome["stack"][-1] if outcome["stack"] else None
            place = f" at {where['file']}:{where['line']} {where['function']}" if where else ""
            lock = f"; compile_lock is held by {owner}" if owner else ""
            waits = ", and waited for here" if outcome["thread"] in waiters else ""
            yield f"{outcome['thread']} had not ended at the deadline{place}{lock}{waits}"


_HALF_IMPORTED = ("partially initialized module", "deadlock detected by _ModuleLock")


def _import_race(record: Record) -> Iterator[str]:
    """Python lets a thread see a half-imported module when two imports wait for each other."""
    for thread, error in _errors(record):
        if any(words in error["message"] for words in _HALF_IMPORTED):
            yield f"{thread} met a module that another thread was importing: {_first(error)}"


def _false_miss(record: Record) -> Iterator[str]:
    """Torch's own words for an entry that is valid and was not found."""
    for thread, error in _errors(record):
        if "runtime guards failed even though they passed" in error["message"]:
            yield f"{thread} missed a valid cache entry: {_first(error)}"


def _false_no_frames(record: Record) -> Iterator[str]:
    """The message is false when the thread, or the trial, has compiled before."""
    warm = {o["thread"]: o.get("steps", 0) > 0 for o in record.get("outcomes", ())}
    compiled = any(record.get("compiles", {}).values())
    for thread, error in _errors(record):
        false = compiled or warm.get(thread, False)
        if false and "fullgraph=True found no compiled frames" in error["message"]:
            yield f"{thread} ran compiled code and was told that there is none"


def _process_raised(record: Record) -> Iterator[str]:
    process = record.get("process", {})
    if process.get("ended") == "raised":
        yield process["what"]


def _thread_raised(record: Record) -> Iterator[str]:
    for thread, error in _errors(record):
        yield f"{thread}: {_first(error)}"


def _eager_flex(record: Record) -> Iterator[str]:
    for thread, count in record.get("watch", {}).get("eager_flex", {}).items():
        if count:
            yield f"{thread} ran flex_attention uncompiled {count} times"


def _recompile_limit(record: Record) -> Iterator[str]:
    for thread, what in record.get("eager", {}).items():
        yield f"{thread} runs uncompiled from here on: {what}"


def _no_graph(record: Record) -> Iterator[str]:
    what = record.get("canaries", {}).get("fresh-compile")
    if what and "captured 0 graphs" in what:
        yield what


def _compile_count(record: Record) -> Iterator[str]:
    planned, counted = record.get("compiles_planned", {}), record.get("compiles", {})
    for label in sorted(planned.keys() | counted.keys()):
        if planned.get(label, 0) != counted.get(label, 0):
            yield f"{label} compiled {counted.get(label, 0)} times, planned {planned.get(label, 0)}"


def _probe(record: Record) -> Iterator[str]:
    for row in record.get("probes", ()):
        if row["at_rest"] is False:
            yield f"{row['probe']} is {row['value']}, at rest {row['rest']}"


def _canary(record: Record) -> Iterator[str]:
    for name, what in record.get("canaries", {}).items():
        if what and "captured 0 graphs" not in what:
            yield f"canary {name}: {what}"


def _open_trace(record: Record) -> Iterator[str]:
    for thread, depth in record.get("watch", {}).get("still_in_trace", {}).items():
        yield f"{thread} ended with {depth} open traces"


def _number(record: Record) -> Iterator[str]:
    for row in record.get("numbers", ()):
        if not 0 <= row["difference"] <= row["tolerance"] < math.inf:  # NaN must fail
            yield (
                f"{row['what']} differs from the reference by {row['difference']:.3g}, "
                f"allowed {row['tolerance']:.3g}"
            )


def _errors(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for outcome in record.get("outcomes", ()):
        if outcome["state"] == "raised":
            yield outcome["thread"], outcome["error"]


def _first(error: Mapping[str, Any]) -> str:
    first = next(iter(error["message"].splitlines()), "")
    return f"{error['type']}: {first[:160]}"


# In this order a trial gets its word; the exceptions with a meaning of their own come before the
# one that takes any. tests/unit/harness/test_detectors_are_needed.py has a control for each.
DETECTORS: tuple[Detector, ...] = (
    Detector("process-died", Verdict.NATIVE_CRASH, _process_died),
    Detector("process-hung", Verdict.DEADLOCK, _process_hung),
    Detector("thread-stuck", Verdict.DEADLOCK, _thread_stuck),
    Detector("import-race", Verdict.RAISED, _import_race),
    Detector("false-miss", Verdict.SPURIOUS_RECOMPILE, _false_miss),
    Detector("false-no-frames", Verdict.SPURIOUS_RECOMPILE, _false_no_frames),
    Detector("process-raised", Verdict.RAISED, _process_raised),
    Detector("thread-raised", Verdict.RAISED, _thread_raised),
    Detector("eager-flex", Verdict.SILENTLY_EAGER, _eager_flex),
    Detector("recompile-limit", Verdict.SILENTLY_EAGER, _recompile_limit),
    Detector("no-graph", Verdict.SILENTLY_EAGER, _no_graph),
    Detector("compile-count", Verdict.SPURIOUS_RECOMPILE, _compile_count),
    Detector("probe", Verdict.STICKY_STATE, _probe),
    Detector("canary", Verdict.STICKY_STATE, _canary),
    Detector("open-trace", Verdict.STICKY_STATE, _open_trace),
    Detector("number", Verdict.WRONG_NUMBER, _number),
)


def findings(record: Record) -> list[Finding]:
    """Everything that the detectors saw, worst first."""
    return [
        Finding(detector.verdict, what) for detector in DETECTORS for what in detector.find(record)
    ]


def judge(record: Record) -> Verdict:
    """The worst finding's verdict, or :attr:`Verdict.COMPLETED`.

    A record without any thread shows nothing: a harness error unless the process itself failed.
    """
    found = findings(record)
    if found:
        return found[0].verdict
    return Verdict.COMPLETED if record.get("outcomes") else Verdict.HARNESS_ERROR


@dataclass(frozen=True)
class Expectation:
    """What a trial must show; :meth:`unmet` says what is missing.

    Attributes:
        verdict: the word.
        exception: class name of the exception (with ``raised``). This and the next three are
            required of every thread that raised.
        message: text that its message contains.
        frame: ``file-end:function`` of the frame that raised it.
        state: probe whose holder must be known to be another thread, for one victim at least.
        exposed: kinds of exposure that must have happened ("fx-trace", "annotation").
        unexposed: kinds that must not have happened (guards that allow no overlap).
    """

    verdict: Verdict
    exception: str | None = None
    message: str | None = None
    frame: str | None = None
    state: str | None = None
    exposed: tuple[str, ...] = ()
    unexposed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in (*self.exposed, *self.unexposed):
            if kind not in EXPOSURES:  # none of a kind that nobody counts would always be true
                raise ValueError(f"unknown exposure {kind!r}: there are {', '.join(EXPOSURES)}")

    def unmet(self, record: Record) -> list[str]:
        """One line per point in which the record is not what was expected; empty when met."""
        lines = []
        if (missed := record.get("script", {}).get("missed")) is not None:
            lines.append(f"script missed: {missed}")
        got = judge(record)
        if got is Verdict.HARNESS_ERROR:
            lines.append("the record names no thread: nothing ran, or the record was not returned")
        elif got is not self.verdict:
            why = "; ".join(str(finding) for finding in findings(record)[:3])
            seen = f" ({why})" if why else ""
            lines.append(f"verdict is {got}, expected {self.verdict}{seen}")
        if (self.exception, self.message, self.frame, self.state) != (None,) * 4:
            lines.extend(self._unmet_errors(record))
        for kind in self.exposed:
            if not exposures(record, kind):
                lines.append(f"no exposure to another thread's {kind}: the danger was not there")
        for kind in self.unexposed:
            if count := exposures(record, kind):
                lines.append(f"{count} exposures to another thread's {kind}, expected none")
        return lines

    def _unmet_errors(self, record: Record) -> list[str]:
        """Every thread that raised must have raised exactly what was expected."""
        lines = []
        dead = [o for o in record.get("outcomes", ()) if o["state"] == "raised"]
        if not dead:
            lines.append(f"no thread raised {self.exception or 'anything'}")
        held = record.get("watch", {}).get("holders", {})
        for outcome in dead:
            error, who = outcome["error"], outcome["thread"]
            if self.exception not in (None, error["type"].rpartition(".")[2]):
                lines.append(f"{who} raised {error['type']}, expected {self.exception}")
            if self.message is not None and self.message not in error["message"]:
                lines.append(f"{who}: {self.message!r} is not in {error['message'][:120]!r}")
            if self.frame is not None and not _frame_matches(error, self.frame):
                last = error["frames"][-1] if error["frames"] else None
                where = f"{last['file']}:{last['line']} {last['function']}" if last else "no frame"
                lines.append(f"{who} raised in {where}, expected {self.frame}")
        if self.state is not None and dead:
            holders = {o["thread"]: held[o["thread"]] for o in dead if o["thread"] in held}
            states = {h["state"] for victim, h in holders.items() if h["thread"] != victim}
            if states != {self.state}:
                lines.append(
                    f"held state is {', '.join(sorted(states)) or 'unknown'}, expected {self.state}"
                )
        return lines


def exposures(record: Record, kind: str) -> int:
    """How often a crew member met another thread's state of this kind (``fx-trace`` ...)."""
    crew = {outcome["thread"] for outcome in record.get("outcomes", ())}
    counts = record.get("watch", {}).get("exposures", {}).get(kind, {})
    return sum(count for thread, count in counts.items() if thread in crew)


def _frame_matches(error: Mapping[str, Any], wanted: str) -> bool:
    if not error["frames"]:
        return False
    file, _, function = wanted.rpartition(":")
    last = error["frames"][-1]
    return bool(last["function"] == function and f"/{last['file']}".endswith(f"/{file}"))
