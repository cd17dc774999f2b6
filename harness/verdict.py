"""In which of eight ways did a compile race show? One word per trial, and every finding behind it.

The verdict is a function of the record alone (:mod:`harness.trial` makes records), so it can be
judged again from a report. Order of severity, worst first: a trial gets the first that applies.

============================  =====================================================================
native crash                  the process died by a signal, or ended without a result
deadlock                      a thread, or the process, had not ended at the deadline
raised                        a thread ended with an exception
silently eager                no exception, but an uncompiled path ran, or a fresh compile captures
                              nothing
spurious recompile            more (or fewer) compiles than planned
sticky state                  everybody stopped, and a probe is not at rest or a canary fails
wrong number                  a result differs from the single-threaded reference
completed                     none of the above
============================  =====================================================================

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


def _native_crash(record: Record) -> Iterator[str]:
    process = record.get("process", {})
    if process.get("ended") in ("signal", "exit"):
        yield process["what"]


def _deadlock(record: Record) -> Iterator[str]:
    process = record.get("process", {})
    if process.get("ended") == "hang":
        yield process["what"]
    for outcome in record.get("outcomes", ()):
        if outcome["state"] == "unfinished":
            where = outcome["stack"][-1] if outcome["stack"] else None
            place = f" at {where['file']}:{where['line']} {where['function']}" if where else ""
            owner = record.get("watch", {}).get("lock_owner")
            lock = f"; compile_lock is held by {owner}" if owner else ""
            yield f"{outcome['thread']} had not ended at the deadline{place}{lock}"


def _raised(record: Record) -> Iterator[str]:
    process = record.get("process", {})
    if process.get("ended") == "raised":
        yield process["what"]
    for outcome in record.get("outcomes", ()):
        if outcome["state"] == "raised":
            error = outcome["error"]
            first = next(iter(error["message"].splitlines()), "")
            yield f"{outcome['thread']}: {error['type']}: {first[:160]}"


def _silently_eager(record: Record) -> Iterator[str]:
    for thread, count in record.get("watch", {}).get("eager_flex", {}).items():
        if count:
            yield f"{thread} ran flex_attention uncompiled {count} times"
    what = record.get("canaries", {}).get("fresh-compile")
    if what and "captured 0 graphs" in what:
        yield what


def _spurious_recompile(record: Record) -> Iterator[str]:
    planned, counted = record.get("compiles_planned", {}), record.get("compiles", {})
    for label in sorted(planned.keys() | counted.keys()):
        if planned.get(label, 0) != counted.get(label, 0):
            yield f"{label} compiled {counted.get(label, 0)} times, planned {planned.get(label, 0)}"


def _sticky_state(record: Record) -> Iterator[str]:
    for row in record.get("probes", ()):
        if row["at_rest"] is False:
            yield f"{row['probe']} is {row['value']}, at rest {row['rest']}"
    for name, what in record.get("canaries", {}).items():
        if what and "captured 0 graphs" not in what:
            yield f"canary {name}: {what}"
    for thread, depth in record.get("watch", {}).get("still_in_trace", {}).items():
        yield f"{thread} ended with {depth} open traces"


def _wrong_number(record: Record) -> Iterator[str]:
    for row in record.get("numbers", ()):
        if not 0 <= row["difference"] <= row["tolerance"] < math.inf:  # NaN must fail
            yield (
                f"{row['what']} differs from the reference by {row['difference']:.3g}, "
                f"allowed {row['tolerance']:.3g}"
            )


# Worst first; each row is one detector.
DETECTORS: tuple[tuple[Verdict, Callable[[Record], Iterator[str]]], ...] = (
    (Verdict.NATIVE_CRASH, _native_crash),
    (Verdict.DEADLOCK, _deadlock),
    (Verdict.RAISED, _raised),
    (Verdict.SILENTLY_EAGER, _silently_eager),
    (Verdict.SPURIOUS_RECOMPILE, _spurious_recompile),
    (Verdict.STICKY_STATE, _sticky_state),
    (Verdict.WRONG_NUMBER, _wrong_number),
)


def findings(record: Record) -> list[Finding]:
    """Everything that the detectors saw, worst first."""
    return [Finding(verdict, what) for verdict, detect in DETECTORS for what in detect(record)]


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
