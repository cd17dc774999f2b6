"""What leaks between threads in this torch: every probe at every stage of a compile.

One thread is stopped at a stage (:mod:`harness.stages`); a bystander thread that does nothing
else reads all probes; the thread goes on and ends; the bystander reads them again. Nothing is
sampled: the thread stands at its place while the others look. Each stage runs in a process of
its own, so no stage sees what another one left.

Not covered: what two threads inside two stages do to each other (that is what trials are for).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from harness import probes, stages, unfix
from harness.isolate import PRELOAD, Isolation, IsolationError

SCHEMA = 1
_PATIENCE = 120.0  # seconds for a stage to be reached; Inductor may need most of it
_DEADLINE = 200.0


class Look(StrEnum):
    """What the bystander sees of a state while another thread is in a stage."""

    REST = "at rest"
    SEEN = "seen"
    OWN = "own"  # only the thread itself sees it
    GREW = "grew"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cell:
    """One probe at one stage.

    Attributes:
        look: see :class:`Look`.
        value: what the bystander saw, or with ``own`` the thread itself ("" at rest).
        stays: the value that is still not at rest after the thread has ended ("" when it is).
    """

    look: Look
    value: str = ""
    stays: str = ""


@dataclass(frozen=True)
class Column:
    """One stage, seen.

    Attributes:
        stage: its name.
        what: where the thread stood.
        problem: why the stage was not reached, or what the program raised ("" when neither).
        cells: probe -> cell.
        absent: what torch lacks where it has no such stage; no problem, and no cells.
    """

    stage: str
    what: str
    problem: str = ""
    cells: Mapping[str, Cell] = field(default_factory=dict)
    absent: str = ""


@dataclass(frozen=True)
class XRay:
    """The whole table."""

    torch: str
    python: str
    unfix: tuple[str, ...]
    columns: tuple[Column, ...]

    def rows(self) -> list[tuple[probes.Probe, list[Cell]]]:
        """Probes of which a thread sees something at some stage, in the catalogue's order."""
        return [(probe, cells) for probe, cells in self._all() if not _quiet(cells)]

    def quiet(self) -> list[str]:
        """Names of the probes that are at rest at every stage."""
        return [probe.name for probe, cells in self._all() if _quiet(cells)]

    def leaks(self) -> dict[str, list[str]]:
        """Probe -> stages at which another thread sees it not at rest."""
        found = {
            probe.name: [
                column.stage
                for column, cell in zip(self.columns, cells, strict=True)
                if cell.look is Look.SEEN
            ]
            for probe, cells in self._all()
        }
        return {name: where for name, where in found.items() if where}

    def sticky(self) -> list[str]:
        """One line per state that stays not at rest after a stage, and not by design."""
        return [
            f"{name} stays {cell.stays} after {column.stage}"
            for column in self.columns
            for name, cell in column.cells.items()
            if cell.stays and name not in stages.by_name(column.stage).leaves
        ]

    def problems(self) -> list[str]:
        """One line per stage that was not reached or raised: the table is not whole then."""
        return [f"{column.stage}: {column.problem}" for column in self.columns if column.problem]

    def absent(self) -> list[str]:
        """One line per stage that this torch does not have."""
        return [f"{column.stage}: {column.absent}" for column in self.columns if column.absent]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the summary that a reader would have to compute."""
        catalogue = {
            probe.name: {
                "where": probe.where,
                "scope": probe.scope,
                "grows": probe.grows,
                "source": probe.source,
            }
            for probe in probes.CATALOGUE
        }
        return {
            "schema": SCHEMA,
            **asdict(self),
            "probes": catalogue,
            "leaks": self.leaks(),
            "sticky": self.sticky(),
            "problems": self.problems(),
        }

    def _all(self) -> list[tuple[probes.Probe, list[Cell]]]:
        missing = Cell(Look.UNKNOWN)
        return [
            (probe, [column.cells.get(probe.name, missing) for column in self.columns])
            for probe in probes.CATALOGUE
        ]


def xray(
    *,
    inductor: bool = False,
    unfix: Sequence[str] = (),
    only: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> XRay:
    """Examines the installed torch.

    Args:
        inductor: the slow stage too.
        unfix: repairs of torch to take out first (:mod:`harness.unfix`).
        only: names of the stages to examine; all when empty.
        progress: told each stage's name before it begins.

    Raises:
        ValueError: an unknown stage or unfix.
        harness.isolate.IsolationError: the fork server does not start.
    """
    chosen = _chosen(inductor, only)
    _check_unfix(unfix)
    modules = [probe.module for probe in probes.CATALOGUE if probe.module]
    columns, facts = [], {"torch": "?", "python": "?"}
    with Isolation(preload=_importable(dict.fromkeys((*PRELOAD, *modules)))) as isolation:
        for stage in chosen:
            if progress is not None:
                progress(stage.name)
            result = isolation.run(
                examine, {"stage": stage.name, "unfix": list(unfix)}, deadline=_DEADLINE
            )
            if result.ended != "returned":
                columns.append(Column(stage.name, stage.what, f"{result.ended}: {result.what}"))
                continue
            facts = result.value["facts"]
            cells = {
                name: Cell(Look(cell["look"]), cell["value"], cell["stays"])
                for name, cell in result.value["cells"].items()
            }
            value = result.value
            columns.append(Column(stage.name, stage.what, value["problem"], cells, value["absent"]))
    return XRay(facts["torch"], facts["python"], tuple(unfix), tuple(columns))


def examine(*, stage: str, unfix: list[str]) -> dict[str, Any]:
    """Runs in its own process: one stage, plain data out."""
    import platform

    import torch

    from harness import unfix as unfixes

    unfixes.unfix(unfix)
    probes.load_all()
    torch.set_num_threads(1)
    session = _Session(stages.by_name(stage))
    session.run()
    return {
        "facts": {"torch": str(torch.__version__), "python": platform.python_version()},
        "problem": session.problem,
        "absent": session.absent,
        "cells": {name: asdict(cell) for name, cell in session.cells().items()},
    }


class _Session:
    """The thread in the stage, the bystander, and what both saw."""

    def __init__(self, stage: stages.Stage) -> None:
        self.stage = stage
        self.problem = ""
        self.absent = ""
        self.rest: dict[str, dict[str, Any]] = {}  # per thread: some states are a thread's own
        self.seen: dict[str, dict[str, Any]] = {}
        self._armed = False
        self._there = threading.Event()
        self._go_on = threading.Event()

    def run(self) -> None:
        from harness.hooks import HookError, Hooks

        points = [self.stage.point] if self.stage.point else []
        actor = threading.Thread(target=self._act, name="actor", daemon=True)
        try:
            with Hooks(self._on_event, points=points):
                self.rest["bystander"] = probes.rest_values()
                actor.start()
                if self._there.wait(_PATIENCE):
                    self.seen["bystander"] = _read_all()
                self._go_on.set()
                actor.join(_PATIENCE)
        except HookError as error:
            self.problem = str(error)
            return
        if actor.is_alive():
            self.problem = f"had not ended after {_PATIENCE:g} s"
        elif not {"actor", "bystander"} <= self.seen.keys() and not (self.problem or self.absent):
            self.problem = "was not reached"
        self.seen["after"] = _read_all()

    def cells(self) -> dict[str, Cell]:
        """What is known of each probe; nothing when the stage was not reached."""
        if not {"actor", "bystander", "after"} <= self.seen.keys():  # or reached too late
            return {}
        return {probe.name: self._cell(probe) for probe in probes.CATALOGUE}

    def _cell(self, probe: probes.Probe) -> Cell:
        rest, own_rest = self.rest["bystander"], self.rest["actor"]
        value, own = self.seen["bystander"][probe.name], self.seen["actor"][probe.name]
        after = self.seen["after"][probe.name]
        left = probes.at_rest(probe, after, rest) is False
        stays = probes.show(after) if left else ""
        if probes.UNKNOWN in (value, rest[probe.name]):
            return Cell(Look.UNKNOWN)
        if probes.changed(probe, value, rest):
            return Cell(Look.GREW if probe.grows else Look.SEEN, probes.show(value), stays)
        if not probe.grows and probes.changed(probe, own, own_rest):
            return Cell(Look.OWN, probes.show(own), stays)
        return Cell(Look.REST, "", stays)

    def _act(self) -> None:
        try:
            rest = self.stage.program(self._stop)
            self.rest["actor"] = probes.rest_values()
            self.rest["bystander"] = {  # preparing may have filled caches
                probe.name: self.rest["actor"][probe.name]
                if probe.scope == probes.PROCESS
                else self.rest["bystander"][probe.name]
                for probe in probes.CATALOGUE
            }
            self._armed = True
            rest()
        except stages.StageAbsent as error:
            self.absent = str(error)
        except Exception as error:
            self.problem = f"the program raised {type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._armed = False
            self._there.set()  # a program that ended without its stage is not waited for

    def _on_event(self, event: Any) -> None:
        if event.point == self.stage.point and event.thread == "actor":
            self._stop()

    def _stop(self) -> None:
        """Called in the actor: looks, says that it is there, and waits to be let go; once."""
        if not self._armed or threading.current_thread().name != "actor":
            return
        self._armed = False
        self.seen["actor"] = _read_all()
        self._there.set()
        self._go_on.wait(_PATIENCE)


def _read_all() -> dict[str, Any]:
    return {probe.name: probes.read(probe) for probe in probes.CATALOGUE}


def _quiet(cells: Sequence[Cell]) -> bool:
    return all(cell.look in (Look.REST, Look.UNKNOWN) and not cell.stays for cell in cells) and any(
        cell.look is Look.REST for cell in cells
    )


def _chosen(inductor: bool, only: Sequence[str]) -> list[stages.Stage]:
    known = [stage.name for stage in stages.STAGES]
    for name in only:
        if name not in known:
            raise ValueError(f"unknown stage {name!r}: there are {', '.join(known)}")
    if only:
        return [stage for stage in stages.STAGES if stage.name in only]
    return [stage for stage in stages.STAGES if inductor or not stage.slow]


def _check_unfix(names: Sequence[str]) -> None:
    for name in names:
        if name not in unfix.CATALOGUE:
            known = ", ".join(unfix.CATALOGUE)
            raise ValueError(f"unknown unfix {name!r}: there are {known}")


def _importable(modules: Mapping[str, None]) -> list[str]:
    """Those that the installed torch has, found without importing them."""
    from importlib.util import find_spec

    found = []
    for module in modules:
        try:
            if find_spec(module) is not None:
                found.append(module)
        except ImportError:
            continue
    return found


__all__ = ["Cell", "Column", "IsolationError", "Look", "XRay", "examine", "xray"]
