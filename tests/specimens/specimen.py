"""What a specimen states about itself, and how a record is compared with it.

A specimen is a minimal program of a few threads that shows one race of torch. Its file defines
``SPECIMEN``, the facts below, and ``program(compile)``, which returns what each thread runs; it
may define ``check(trial, results)`` (numbers and counts, before the audit) and ``afterwards()``
(what a later, single-threaded user of the same process meets; a dictionary).

The expected outcome is stated per version of torch from which on it holds, as measured on 2.9.1,
2.11.0, 2.13.0, 2.14.1 and 2.15.0 (``nox -s matrix``); between two of them it is a guess. This file
imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Verdict, judge
from harness.verdict import findings

FOLDER = Path(__file__).parent
_MARK = "\nSPECIMEN = Specimen("


@dataclass(frozen=True)
class Shows:
    """How a run must end.

    Attributes:
        verdict: of :class:`harness.verdict.Verdict`, as its value.
        raises: thread -> text of its exception (type and message); all others must end well.
        stuck: the probes that must not be at rest afterwards; all others must be.
        later: facts that ``afterwards()`` must tell.
        refused: whether the schedule cannot be followed: the threads are kept, or keep, apart.
    """

    verdict: str = "completed"
    raises: Mapping[str, str] = field(default_factory=dict)
    stuck: tuple[str, ...] = ()
    later: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False

    def unmet(self, record: Mapping[str, Any]) -> list[str]:
        """One line per difference to a trial's record; none when that is as stated."""
        lines = []
        missed = record.get("script", {}).get("missed")
        if self.refused and missed is None:
            lines.append("the schedule was followed, and should have been refused")
        elif not self.refused and missed is not None:
            lines.append(f"the schedule was not followed: {missed}")
        if str(judge(record)) != self.verdict:
            why = "; ".join(str(finding) for finding in findings(record)[:3])
            lines.append(f"verdict is {judge(record)} ({why}), expected {self.verdict}")
        lines += self._unmet_errors(record)
        stuck = {row["probe"] for row in record.get("probes", ()) if row["at_rest"] is False}
        if stuck != set(self.stuck):
            lines.append(f"not at rest: {sorted(stuck)}, expected {sorted(self.stuck)}")
        told = record.get("later", {})
        for name, value in self.later.items():
            if told.get(name) != value:
                lines.append(f"afterwards {name} is {told.get(name)!r}, expected {value!r}")
        return lines

    def _unmet_errors(self, record: Mapping[str, Any]) -> list[str]:
        died = {
            outcome["thread"]: f"{outcome['error']['type']}: {outcome['error']['message']}"
            for outcome in record.get("outcomes", ())
            if outcome["state"] == "raised"
        }
        lines = [f"{who} raised {died[who][:120]}" for who in died.keys() - self.raises.keys()]
        for who, text in self.raises.items():
            if text not in died.get(who, ""):
                lines.append(f"{who}: {text!r} is not in {died.get(who, 'no exception')[:160]!r}")
        return lines


@dataclass(frozen=True)
class Specimen:
    """One row of the catalogue of races.

    Attributes:
        rows: numbers of public reports, in words, or "none found".
        state: the probe or the variable that two threads share.
        symptom: what a user sees.
        expect: first torch version (``"2.13"``) -> what the schedule shows from there on.
        schedule: the forced order (:mod:`harness.replay`); empty where one thread is enough.
        points: switch points beside :data:`harness.control.SWITCH_POINTS`.
        unfix: repairs of torch to take out for ``unfixed``.
        unfixed: what it shows then, from the version on that has the repair.
        in_turn: whether the same threads one after the other are clean; False where it takes no
            overlap.
        guarded: what the same schedule shows under ``dflash.compile.compile_guard("auto")``;
            per version where that differs; None where the row is no race.
        canaries: whether the small programs that must still work are run afterwards.
        absent: why it does not reproduce, per version from which on that is so.
    """

    rows: str
    state: str
    symptom: str
    expect: Mapping[str, Shows]
    schedule: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    unfix: tuple[str, ...] = ()
    unfixed: Shows | None = None
    in_turn: bool = True
    guarded: Shows | Mapping[str, Shows] | None = field(default_factory=Shows)
    canaries: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)

    def expected(self, torch_version: str) -> Shows | None:
        """What this torch shows; None where it is too old for the program."""
        return _at(self.expect, torch_version)

    def behind_guard(self, torch_version: str) -> Shows | None:
        """What this torch shows behind the guard; None where the row is no race."""
        if self.guarded is None or isinstance(self.guarded, Shows):
            return self.guarded
        return _at(self.guarded, torch_version)

    def unfix_here(self, torch_version: str) -> list[str]:
        """The repairs to take out on this torch, which has them, so that the race is there."""
        expected = self.expected(torch_version)
        if self.unfixed is None or expected is None or expected == self.unfixed:
            return []
        return list(self.unfix)


def _at(table: Mapping[str, Shows], torch_version: str) -> Shows | None:
    here = _minor(torch_version)
    known = [version for version in table if _minor(version) <= here]
    return table[max(known, key=_minor)] if known else None


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def names() -> list[str]:
    """All specimens' names, by their files."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if _MARK in path.read_text())


def facts(name: str) -> Specimen:
    """The facts of one specimen; its file is not run, so no torch is imported.

    Raises:
        ValueError: the file's ``SPECIMEN`` is not a plain literal call.
    """
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["SPECIMEN"]:
            code = compile(ast.Expression(node.value), f"{name}.py", "eval")
            found: Specimen = eval(code, {"Specimen": Specimen, "Shows": Shows})
            return found
    raise ValueError(f"{name}.py has no SPECIMEN")


__all__ = ["FOLDER", "Shows", "Specimen", "Verdict", "facts", "names"]
