"""One trial: unfixes, hooks, a watch, a crew, an audit. Its record is plain data.

::

    with Trial(unfix=["fx-tracing-flag"], script=Script([...])) as trial:
        compiled = torch.compile(f)                  # build the program under test in here
        trial.run(3, work, start="staggered")        # work(member) in drafter-0 .. drafter-2
        trial.expect_compiles({"f": 1}, counted)
        trial.number("output", difference, 1e-5)
    record = trial.record()

A trial dirties its process: state may stick, code may have been exchanged. Run it in an isolated
process (:mod:`harness.isolate`), once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from harness.cause import Region, change_from, explain
from harness.control import FREE, SCRIPTED, VARIABLE, Control, Recorder, from_spec
from harness.crew import UNFINISHED, Crew, CrewError, Member, Outcome
from harness.linewise import Lines
from harness.points import stages
from harness.replay import Schedule
from harness.schedule import Script


class Trial:
    """Context manager; see the module's docstring.

    Args:
        unfix: names of upstream repairs to take out first.
        script: forced interleaving, or None for a free run.
        control: decides every switch (:class:`harness.control.Control`), instead of a script.
            The environment's ``RACE_CONTROL`` (a replay, say) takes the place of both.
        points: further points to install (:class:`harness.hooks.Hooks`); those that the script
            or the control name are installed anyway.
        interval: seconds between two samples of the bystander.
    """

    def __init__(
        self,
        *,
        unfix: Sequence[str] = (),
        script: Script | None = None,
        control: Control | None = None,
        points: Sequence[str] = (),
        interval: float = 0.02,
    ) -> None:
        if script is not None and control is not None:
            raise CrewError("a trial has a script or a control, not both")
        if VARIABLE in os.environ:
            script, control = None, from_spec(json.loads(os.environ[VARIABLE]))
        self._region: Region | None = None
        if (change := change_from(os.environ)) is not None:  # see harness.cause.counterfactual
            control = None
            patience = script.patience if script is not None else 30.0
            script = Script(change.steps, patience=patience) if change.steps else None
            self._region = Region() if change.lock else None
        self._unfix = tuple(unfix)
        self._script = script
        self._control = control
        self._points = (*points, *(step.point for step in (script.steps if script else ())))
        self._recorder = Recorder(FREE if script is None else SCRIPTED, self._points)
        self._interval = interval
        self._stack = contextlib.ExitStack()
        self._outcomes: list[Outcome] = []
        self._extra: list[tuple[str, Callable[[Member], Any]]] = []
        self._data: dict[str, Any] = {"compiles": {}, "compiles_planned": {}, "numbers": []}

    def __enter__(self) -> Trial:
        import torch

        from harness import unfix as unfixes
        from harness.hooks import Hooks
        from harness.watch import EagerFrames, Watch

        self._begun = time.monotonic()
        self.watch = Watch(interval=self._interval)
        self._data |= {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "unfix": unfixes.unfix(self._unfix),
        }
        listeners = [self.watch.on_event]
        points = [*self._points, *stages(sys.modules)]
        if self._control is not None:
            listeners.append(self._control.on_event)
            points += self._control.points
        elif self._script is not None:
            listeners.append(self._script.on_event)
        if self._control is None:
            listeners.append(self._recorder.on_event)
        if self._region is not None:
            listeners = [self._region.arrive, *listeners, self._region.leave]
        self._stack.enter_context(EagerFrames(self._data.setdefault("eager", {})))
        self.hooks = self._stack.enter_context(Hooks(*listeners, points=points))
        if self._control is not None:
            arrive = self.hooks.only(self._control.on_event)
            self._stack.enter_context(Lines(self._control.points, arrive))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add_thread(self, name: str, function: Callable[[Member], Any]) -> None:
        """One more thread beside the crew, with a function of its own."""
        self._extra.append((name, function))

    def run(
        self,
        size: int,
        function: Callable[[Member], Any],
        *,
        start: str = "staggered",
        after_step: int = 1,
        deadline: float = 120.0,
        name: str = "drafter",
    ) -> list[Outcome]:
        """Runs the crew under this trial's hooks, watch and script; returns its outcomes.

        Under a control the start pattern counts for nothing: it decides who begins.

        Raises:
            CrewError: the crew cannot be, or the trial has run one already.
        """
        if self._outcomes:
            raise CrewError("a trial runs one crew: make a new trial, in a new process")
        crew = Crew(
            size,
            start=start if self._control is None else "together",
            after_step=after_step,
            deadline=deadline,
            name=name,
            hooks=self.hooks,
            script=self._script if self._control is None else self._control,
        )
        for extra_name, extra in self._extra:
            crew.add(extra_name, extra)
        self._recorder.begin(member.name for member in crew._everybody())
        with self.watch:
            self._outcomes = crew.run(function)
        return self._outcomes

    def expect_compiles(self, planned: Mapping[str, int], counted: Mapping[str, int]) -> None:
        """States how often each compiled function should have been compiled, and was."""
        self._data["compiles_planned"] = dict(planned)
        self._data["compiles"] = dict(counted)

    def number(self, what: str, difference: float, tolerance: float) -> None:
        """Records how far a result is from its single-threaded reference."""
        self._data["numbers"].append(
            {"what": what, "difference": difference, "tolerance": tolerance}
        )

    def compare(
        self,
        who: str,
        got: Mapping[str, Any],
        reference: Mapping[str, Any],
        tolerance: float,
    ) -> None:
        """Compares two snapshots of :mod:`harness.reference`, a row per part; both must match."""
        from harness.reference import largest_difference

        for part in sorted(got.keys() | reference.keys()):
            difference = largest_difference(got.get(part), reference.get(part))
            self.number(f"{who} {part}", difference, tolerance)

    def note(self, **facts: Any) -> None:
        """Adds facts of the program under test to the record (plain data)."""
        self._data.setdefault("notes", {}).update(facts)

    def record(self, *, canaries: bool = True) -> dict[str, Any]:
        """Audits the state, runs the canaries (or not) and returns everything as plain data.

        Call it after the ``with`` block. Neither audit nor canaries run while a thread is still
        alive: what they would see then is not what is left, but what goes on.
        """
        from harness import probes, stacks

        stopped = all(outcome.state != UNFINISHED for outcome in self._outcomes)
        record = self._data | {
            "seconds": round(time.monotonic() - self._begun, 3),
            "outcomes": [outcome.as_dict() for outcome in self._outcomes],
            "watch": self.watch.summary(),
            "probes": probes.audit(self.watch.rest) if stopped else [],
            "canaries": probes.run_canaries() if stopped and canaries else {},
            "script": self._script_record(),
            "schedule": self._schedule_record(),
            "stacks": {} if stopped else stacks.python_stacks(),
            "native_stacks": "" if stopped else stacks.native_stacks(),
        }
        return record | {"cause": explain(record)}

    def _script_record(self) -> dict[str, Any]:
        if self._control is not None:
            missed, parted = self._control.missed(), self._control.parted()
            if missed is None and parted is not None:
                missed = f"uncontrolled: {parted}"
            steps = [str(line) for line in self._control.schedule().lines]
            return {"steps": steps, "passed": steps, "missed": missed}
        failed = self._region.failed if self._region is not None else None
        if self._script is None:
            return {} if failed is None else {"steps": [], "passed": [], "missed": failed}
        return {
            "steps": [str(step) for step in self._script.steps],
            "passed": self._script.passed(),
            "missed": failed or self._script.missed(),
        }

    def _schedule_record(self) -> dict[str, Any]:
        record = (self._recorder if self._control is None else self._control).record()
        facts = {name: self._data[name] for name in ("torch", "python")}
        record["text"] = str(Schedule.parse(record["text"]).with_facts(**facts))
        return record
