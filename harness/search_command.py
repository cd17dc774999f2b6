"""What ``harness explore``, ``harness replay`` and ``harness shrink`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import probes
from harness.control import SWITCH_POINTS
from harness.explore import PRELOADED, Runner, Target, no_record
from harness.explore import explore as search
from harness.isolate import Isolation, IsolationError
from harness.points import to_install
from harness.replay import Schedule
from harness.shrink import same_verdict
from harness.shrink import shrink as make_smaller
from harness.unfix import CATALOGUE
from harness.verdict import Record, Verdict, findings, judge

__all__ = ["Done", "IsolationError", "explore", "replay", "shrink", "stuck"]


@dataclass(frozen=True)
class Done:
    """What the command prints, and its exit code."""

    text: str
    code: int


def explore(
    program: str,
    *,
    bound: int,
    budget: float,
    strategy: str,
    points: Sequence[str],
    unfix: Sequence[str],
    state: str | None,
    out: Path,
) -> Done:
    """Searches, and writes the failing schedule to ``out``.

    Raises:
        ValueError: an argument cannot be.
    """
    file, _, name = program.rpartition(":")
    if not file or not Path(file).is_file() or not name.isidentifier():
        raise ValueError(f"{program!r} is not FILE:FUNCTION with a file that exists")
    for wrong in [one for one in unfix if one not in CATALOGUE]:
        raise ValueError(f"unknown unfix {wrong!r}: there are {', '.join(CATALOGUE)}")
    to_install(points)
    target = Target(str(Path(file).resolve()), name, unfix=tuple(unfix))
    _must_be_writable(out)
    found = search(
        target,
        bound=bound,
        budget_seconds=budget,
        strategy=strategy,
        points=tuple(points) or SWITCH_POINTS,
        failing=None if state is None else stuck(state),
    )
    text = str(found)
    if found.schedule is not None:
        found.schedule.save(out)
        text += (
            f"\nschedule: {out} ({found.schedule.switches} switches)\nreplay: harness replay {out}"
        )
    return Done(text, 0 if found.outcome == "clean" else 1)


def replay(path: Path) -> Done:
    """Follows a schedule.

    Raises:
        ValueError: it cannot be read, or its target is not there.
    """
    schedule = Schedule.load(path)
    target = Target.of_schedule(schedule)
    with Isolation(preload=PRELOADED) as isolation:
        record = Runner(target, isolation).replay(schedule)
    missed = record.get("script", {}).get("missed")
    seen = [str(finding) for finding in findings(record)]
    lines = [f"verdict: {judge(record)}", *seen]
    if missed is not None:
        lines.append(f"{Verdict.HARNESS_ERROR}: {missed}")
    elif "schedule" not in record:
        lines.append(f"no trace to compare: {no_record(record)}")
    else:
        lines.append("the trace is the recorded one" if schedule.trace else "no trace to compare")
    clean = judge(record) is Verdict.COMPLETED and missed is None
    return Done("\n".join(lines), 0 if clean else 1)


def shrink(path: Path, *, state: str | None, out: Path | None) -> Done:
    """Makes a schedule smaller, and writes the result.

    Raises:
        ValueError: it cannot be read, its target is not there, or it does not fail that way.
    """
    schedule = Schedule.load(path)
    target = Target.of_schedule(schedule)
    if state is None and "verdict" not in schedule.facts:
        raise ValueError(f"{path} has no line 'verdict: ...'; say what to keep with --state")
    keep = same_verdict(schedule) if state is None else stuck(state)
    out = out or path.with_suffix(f".small{path.suffix}")
    _must_be_writable(out)
    with Isolation(preload=PRELOADED) as isolation:
        small = make_smaller(schedule, Runner(target, isolation).replay, keep)
    small.schedule.save(out)
    lines = [str(small), *map(str, small.schedule.lines), f"schedule: {out}"]
    return Done("\n".join(lines), 0 if small.holds else 1)


def _must_be_writable(path: Path) -> None:
    """Said before the search, which takes a minute, and not after it."""
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error
    if new:
        path.unlink()


def stuck(state: str) -> Callable[[Record], bool]:
    """Whether a record shows the probe ``state`` not at rest after everybody has stopped.

    Raises:
        ValueError: no probe has that name.
    """
    names = [probe.name for probe in probes.CATALOGUE]
    if state not in names:
        raise ValueError(f"no probe is called {state!r}; 'harness probes' lists them")
    return lambda record: any(
        row["probe"] == state and row["at_rest"] is False for row in record.get("probes", ())
    )
