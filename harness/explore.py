"""Searches the schedules of a program of a few threads, each in a fresh process.

::

    def program():                      # at the top level of a file; takes plain arguments
        return [first, second]          # what each thread runs

    found = explore(program, bound=2, budget_seconds=60)

Nobody says where to look: every arrival at a switch point (:data:`harness.control.SWITCH_POINTS`)
is a place where another thread may go on. ``preemptions`` tries all schedules with up to
``bound`` preemptions, those with fewer first; a switch that has to be (a thread ended, or waits
for a lock) costs nothing, and all its alternatives are tried. Among equals those come first that
preempt where a thread writes state that others see (:data:`harness.watch.WRITES`), and a thread's
first arrival at a point before its later ones. ``pct`` tries seeds.

What it says: *found* (the first failing schedule, run a second time), *clean* with its bound (n
of n schedules), *inconclusive* when the budget ended first, or *harness error* when runs could
not be controlled: a schedule was missed, a process ended without a record, or a run did not make
the choices again of the run that it varies. A clean result says nothing of what happens between
two points, in C++, or on other torch versions.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.control import SWITCH_POINTS, VARIABLE
from harness.isolate import PRELOAD, CaseResult, Isolation, _address
from harness.replay import Schedule, ScheduleError
from harness.search_order import FewestFirst, Seeds
from harness.verdict import Record, Verdict, findings, judge

PRELOADED = (*PRELOAD, "harness.trial", "harness.hooks", "harness.watch", "harness.probes")
_ERRORS_SHOWN = 3
PROGRAM, CASE = "program", "case"


class ExploreError(ValueError):
    """The search cannot be made; one line says why."""


@dataclass(frozen=True)
class Target:
    """What is run under each schedule.

    Attributes:
        file: where it is defined.
        name: a function at the top level of that file.
        kind: ``program`` (returns a list of callables, one per thread) or ``case`` (makes a
            :class:`harness.trial.Trial` itself and returns its record).
        arguments: plain data for the function.
        unfix: repairs to take out first (programs only; a case does it itself).
        canaries: whether the canaries run after each schedule (programs only).
    """

    file: str
    name: str
    kind: str = PROGRAM
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unfix: tuple[str, ...] = ()
    canaries: bool = False

    def facts(self) -> dict[str, str]:
        """Header lines of a schedule that was found with this target."""
        options = {
            "arguments": dict(self.arguments),
            "unfix": list(self.unfix),
            "canaries": self.canaries,
        }
        return {
            "target": f"{self.file}:{self.name}",
            "kind": self.kind,
            "options": json.dumps(options, sort_keys=True),
        }

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> Target:
        """The target that a schedule names.

        Raises:
            ScheduleError: it names none that is there.
        """
        file, _, name = schedule.facts.get("target", "").rpartition(":")
        if not file:
            raise ScheduleError("the schedule has no line 'target: FILE:FUNCTION'")
        if not Path(file).is_file():
            raise ScheduleError(f"the schedule's target {file} does not exist")
        try:
            options = json.loads(schedule.facts.get("options", "{}"))
        except ValueError as error:
            raise ScheduleError(f"the schedule's options are not JSON ({error})") from error
        kind = schedule.facts.get("kind", PROGRAM)
        if kind not in (PROGRAM, CASE) or not isinstance(options, dict):
            raise ScheduleError("the schedule's 'kind' or 'options' line is wrong")
        return cls(
            file,
            name,
            kind,
            options.get("arguments", {}),
            tuple(options.get("unfix", ())),
            bool(options.get("canaries", False)),
        )


class Runner:
    """Runs a target under a control, in a fresh process each time.

    Args:
        target: what to run.
        isolation: the fork server; its cases must be able to import the harness.
        deadline: seconds for one run.
    """

    def __init__(self, target: Target, isolation: Isolation, *, deadline: float = 30.0) -> None:
        self.target = target
        self._isolation = isolation
        self._deadline = deadline

    def run(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The trial's record; ``spec`` as in :func:`harness.control.from_spec`.

        Raises:
            ExploreError: the target itself failed, before any thread of it ran.
        """
        target = self.target
        result: CaseResult = self._isolation.run(
            run_target,
            {
                "file": target.file,
                "name": target.name,
                "kind": target.kind,
                "arguments": dict(target.arguments),
                "unfix": list(target.unfix),
                "canaries": target.canaries,
                "deadline": self._deadline,
            },
            deadline=self._deadline * 2,
            label=target.name,
            # More than the crew's deadline: who waits for ever is a deadlock, and no miss.
            environment={VARIABLE: json.dumps({"patience": self._deadline * 2} | dict(spec))},
        )
        if result.ended == "raised":
            raise ExploreError(f"{target.name} cannot run: {result.what}")
        return result.record()

    def replay(self, schedule: Schedule, *, lenient: bool = False) -> dict[str, Any]:
        """The record of a run that follows ``schedule``."""
        spec = {"strategy": "follow", "schedule": str(schedule), "lenient": lenient}
        return self.run(spec)


def run_target(
    *,
    file: str,
    name: str,
    kind: str,
    arguments: dict[str, Any],
    unfix: list[str],
    canaries: bool,
    deadline: float,
) -> dict[str, Any]:
    """What runs in the fresh process: one trial of the target."""
    from harness.crew import Member
    from harness.trial import Trial

    spec = importlib.util.spec_from_file_location(f"race_target_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    if (folder := str(Path(file).parent)) not in sys.path:  # as if Python had been given the file
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name)
    if kind == CASE:
        record: dict[str, Any] = function(**arguments)
        return record
    with Trial(unfix=unfix, interval=0) as trial:
        threads = list(function(**arguments))

        def work(member: Member) -> None:
            with member.step(0):
                threads[member.index]()

        trial.run(len(threads), work, name="thread", deadline=deadline)
    return trial.record(canaries=canaries)


@dataclass
class Exploration:
    """What a search found.

    Attributes:
        outcome: ``found``, ``clean``, ``inconclusive`` or ``harness error``.
        tried: schedules that were run.
        waiting: schedules known and not run (0 in a clean result).
        bound: what was searched, in words.
        seconds: how long it took.
        schedule: the failing one.
        record: its record.
        errors: runs that could not be controlled, one line each.
        controlled: whether the failing schedule, run again, passed the same trace; None when
            there is none to run again.
    """

    outcome: str
    tried: int
    waiting: int
    bound: str
    seconds: float
    schedule: Schedule | None = None
    record: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)
    controlled: bool | None = None

    def __str__(self) -> str:
        head = f"{self.outcome}: "
        if self.outcome == "found":
            what = "; ".join(str(finding) for finding in findings(self.record or {})[:2])
            again = {
                True: "",
                False: "; uncontrolled: a second run went another way",
                None: "; it left no schedule that could be run again",
            }[self.controlled]
            return (
                f"{head}schedule {self.tried} of {self.bound}, {self.seconds:.1f} s: {what}{again}"
            )
        if self.outcome == "clean":
            return f"{head}{self.tried} of {self.tried} schedules with {self.bound}"
        if self.outcome == "inconclusive":
            return (
                f"{head}the budget ended after {self.tried} schedules with {self.bound}, "
                f"at least {self.waiting} were left"
            )
        return f"{head}{'; '.join(self.errors[:_ERRORS_SHOWN])}"


def explore(
    program: Callable[..., Any] | Target,
    *,
    bound: int = 2,
    budget_seconds: float = 60.0,
    strategy: str = "preemptions",
    depth: int = 3,
    seeds: int = 1000,
    points: Sequence[str] = SWITCH_POINTS,
    arguments: Mapping[str, Any] | None = None,
    unfix: Sequence[str] = (),
    canaries: bool = False,
    failing: Callable[[Record], bool] | None = None,
    isolation: Isolation | None = None,
    deadline: float = 30.0,
) -> Exploration:
    """Runs schedules until one fails, all are done, or the time is over.

    Args:
        program: see the module's docstring; or a target.
        bound: most preemptions of one schedule.
        budget_seconds: no schedule is begun later than that; the server's start is not counted.
        strategy: ``preemptions`` or ``pct``.
        depth: of ``pct``.
        seeds: how many schedules ``pct`` tries.
        points: where threads may be switched.
        arguments: plain data for the program.
        unfix: repairs of torch to take out first.
        canaries: whether to run the canaries after each schedule (about 0.4 s each time).
        failing: which record is what is looked for (default: any verdict but completed).
        isolation: a fork server to use; by default one for this search.
        deadline: seconds for one schedule.

    Raises:
        ExploreError: an argument cannot be, or the program itself fails.
    """
    if bound < 0 or seeds < 1:
        raise ExploreError(f"bound cannot be below 0 nor seeds below 1, not {bound} and {seeds}")
    if not budget_seconds > 0:
        raise ExploreError(f"budget_seconds must be positive, not {budget_seconds}")
    if depth < 1:
        raise ExploreError(f"depth counts from 1, not {depth}")
    if strategy not in ("preemptions", "pct"):
        raise ExploreError(f"unknown strategy {strategy!r}: use preemptions or pct")
    if isinstance(program, Target):
        target = program
    else:
        file, name = _address(program)
        options = dict(arguments or {})
        target = Target(file, name, PROGRAM, options, tuple(unfix), canaries)
    failing = failing or _fails
    with ExitStack() as stack:
        if isolation is None:
            isolation = stack.enter_context(Isolation(preload=PRELOADED))
        runner = Runner(target, isolation, deadline=deadline)
        base = {"points": list(points)}
        search: FewestFirst | Seeds
        if strategy == "preemptions":
            search = FewestFirst(bound)
        else:
            search = Seeds(seeds, depth, runner.run(base | {"strategy": "preemptions"}))
        begun = time.monotonic()
        errors: list[str] = []
        tried = 0
        for spec in search:
            if time.monotonic() - begun > budget_seconds:
                waiting = search.waiting() + 1
                seconds = time.monotonic() - begun
                return Exploration(
                    "inconclusive", tried, waiting, search.words, seconds, errors=errors
                )
            record = runner.run(base | spec)
            tried += 1
            if (missed := record.get("script", {}).get("missed")) is not None:
                errors.append(f"schedule {tried}: {missed}")
                continue
            if failing(record):
                return _confirm(runner, search.words, tried, begun, record, errors)
            if "schedule" not in record:
                errors.append(f"schedule {tried}: {no_record(record)}")
            elif (why := search.parted(spec, record)) is not None:
                errors.append(f"schedule {tried}: uncontrolled: {why}")
            else:
                search.learn(spec, record)
        seconds = time.monotonic() - begun
        outcome = "harness error" if errors else "clean"
        return Exploration(outcome, tried, 0, search.words, seconds, errors=errors)


def _confirm(
    runner: Runner,
    words: str,
    tried: int,
    begun: float,
    record: dict[str, Any],
    errors: list[str],
) -> Exploration:
    seconds = time.monotonic() - begun
    facts = runner.target.facts() | {"verdict": str(judge(record))}
    controlled = None
    schedule = None
    if "schedule" in record:  # not after a native crash
        schedule = Schedule.parse(record["schedule"]["text"]).with_facts(**facts)
        again = runner.replay(schedule)
        controlled = bool(again.get("schedule", {}).get("controlled")) and (
            judge(again) is judge(record)
        )
    return Exploration(
        "found", tried, 0, words, seconds, schedule, record, errors, controlled=controlled
    )


def _fails(record: Record) -> bool:
    return judge(record) is not Verdict.COMPLETED


def no_record(record: Record) -> str:
    """What became of a process that has not returned a trial's record."""
    return f"the process left no record: {record.get('process', {}).get('what', 'it ended')}"
