"""One case of a run, reduced to what a table shows. Plain data: it crosses process borders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.capture import shorten
from harness.verdict import EXPOSURES, Expectation, Record, exposures, findings, judge

DANGERS = EXPOSURES


@dataclass(frozen=True)
class Row:
    """A judged case.

    Attributes:
        case: its name, without the number of the repetition.
        kind: ``control`` (must be caught) or ``guarded`` (must complete) or what the test says.
        completed: threads that completed, of all.
        threads: number of threads.
        verdict: the word.
        expected: the word that it had to be.
        unmet: why the case is not what it had to be; empty when it is.
        frame: the frame that raised, of the first thread that did.
        holder: who held the state then.
        exposures: danger -> how often a crew member met it.
        seconds: of the whole case.
        findings: all of them.
        known: owner and report of the baseline entry that excuses it.
        torch: version that ran; empty when the process did not come to say it.
        test: ``FILE:LINE`` of the call in the test, the file relative to pytest's root.
        replay: the command that runs it again.
        file: name of its file in ``cases/``; empty without ``--race-report``.
    """

    case: str
    kind: str
    completed: int
    threads: int
    verdict: str
    expected: str
    unmet: tuple[str, ...] = ()
    frame: str = ""
    holder: str = ""
    exposures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    findings: tuple[str, ...] = ()
    known: str = ""
    torch: str = ""
    test: str = ""
    replay: str = ""
    file: str = ""

    @property
    def met(self) -> bool:
        """Whether the case is what it had to be."""
        return not self.unmet

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of :meth:`as_dict`, also after JSON."""
        return cls(**{**data, "unmet": tuple(data["unmet"]), "findings": tuple(data["findings"])})


def make_row(
    case: str, kind: str, record: Record, expect: Expectation, *, test: str = "", replay: str = ""
) -> Row:
    """Judges a record; ``test`` and ``replay`` say where it stands and how it is run again."""
    outcomes = record.get("outcomes", ())
    frame, holder = _failure(record)
    return Row(
        case=case,
        kind=kind,
        completed=sum(outcome["state"] == "completed" for outcome in outcomes),
        threads=len(outcomes),
        verdict=str(judge(record)),
        expected=str(expect.verdict),
        unmet=tuple(expect.unmet(record)),
        frame=frame,
        holder=holder,
        exposures={kind: exposures(record, kind) for kind in DANGERS},
        seconds=record.get("process", {}).get("seconds", record.get("seconds", 0.0)),
        findings=tuple(str(finding) for finding in findings(record)),
        torch=str(record.get("torch", "")),
        test=test,
        replay=str(record.get("replay") or replay),
    )


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """The repeats of each case together, in the order of their first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return list(groups.values())


def worst(group: Sequence[Row]) -> Row:
    """The repeat that stands for all: the first that fails the run, else a known one, else any."""
    return min(group, key=lambda row: (row.met, bool(row.known)))


def _failure(record: Record) -> tuple[str, str]:
    for outcome in record.get("outcomes", ()):
        error = outcome["error"]
        if outcome["state"] == "raised" and error["frames"]:
            last = error["frames"][-1]
            held = record.get("watch", {}).get("holders", {}).get(outcome["thread"])
            return (
                f"{shorten(last['file'])}:{last['line']} {last['function']}",
                f"{held['thread']} ({held['state']})" if held else "",
            )
    return "", ""
