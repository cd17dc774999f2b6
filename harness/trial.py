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
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from harness.control import VARIABLE, Control, Recorder, from_spec
from harness.crew import UNFINISHED, Crew, CrewError, Member, Outcome
from harness.linewise import Lines
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
        self._unfix = tuple(unfix)
        self._script = script
        self._control = control
        self._recorder = Recorder("scripted" if script is not None else "free")
        self._points = tuple(points)
        self._interval = interval
        self._stack = contextlib.ExitStack()
        self._outcomes: list[Outcome] = []
        self._extra: list[tuple[str, Callable[[Member], Any]]] = []
        self._data: dict[str, Any] = {"compiles": {}, "compiles_planned": {}, "numbers": []}

    def __enter__(self) -> Trial:
        import torch

        from harness import unfix as unfixes
        from harness.hooks import Hooks
        from harness.watch import Watch

        self._begun = time.monotonic()
        self.watch = Watch(interval=self._interval)
        self._data |= {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "unfix": unfixes.unfix(self._unfix),
        }
        listeners = [self.watch.on_event]
        points = list(self._points)
        if self._control is not None:
            listeners.append(self._control.on_event)
            points += self._control.points
        elif self._script is not None:
            listeners.append(self._script.on_event)
            points += [step.point for step in self._script.steps]
        if self._control is None:
            listeners.append(self._recorder.on_event)
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

    def note(self, **facts: Any) -> None:
        """Adds facts of the program under test to the record (plain data)."""
        self._data.setdefault("notes", {}).update(facts)

    def record(self, *, canaries: bool = True) -> dict[str, Any]:
        """Audits the state, runs the canaries (or not) and returns everything as plain data.

        Call it after the ``with`` block. Neither audit nor canaries run while a thread is still
        alive: what they would see then is not what is left, but what goes on.
        """
        from harness import probes

        stopped = all(outcome.state != UNFINISHED for outcome in self._outcomes)
        return self._data | {
            "seconds": round(time.monotonic() - self._begun, 3),
            "outcomes": [outcome.as_dict() for outcome in self._outcomes],
            "watch": self.watch.summary(),
            "probes": probes.audit(self.watch.rest) if stopped else [],
            "canaries": probes.run_canaries() if stopped and canaries else {},
            "script": self._script_record(),
            "schedule": self._schedule_record(),
        }

    def _script_record(self) -> dict[str, Any]:
        if self._control is not None:
            missed, parted = self._control.missed(), self._control.parted()
            if missed is None and parted is not None:
                missed = f"uncontrolled: {parted}"
            steps = [str(line) for line in self._control.schedule().lines]
            return {"steps": steps, "passed": steps, "missed": missed}
        if self._script is None:
            return {}
        return {
            "steps": [str(step) for step in self._script.steps],
            "passed": self._script.passed(),
            "missed": self._script.missed(),
        }

    def _schedule_record(self) -> dict[str, Any]:
        record = (self._recorder if self._control is None else self._control).record()
        facts = {name: self._data[name] for name in ("torch", "python")}
        record["text"] = str(Schedule.parse(record["text"]).with_facts(**facts))
        return record
