"""``--race-replay FILE``: the one test that FILE names runs again under the schedule in it.

A failing race test writes its schedule beside the report (or into pytest's cache) and prints the
command. The schedule goes to the isolated case in its environment, takes the place of the case's
control or start pattern, and must pass the recorded trace: a run that goes another way is a
harness error that says where the two part, and a test that never comes to that case fails. A run
that its own script forced is repeated by that script: what stands in the file is what was seen
then, several threads at a time.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.control import SCRIPTED, VARIABLE
from harness.explore import CASE, Target
from harness.isolate import _address
from harness.replay import Schedule, ScheduleError
from harness.verdict import judge

BAD_INPUT = 2
REPETITION = "_race_repetition"  # the parameter, and the fixture, that counts repetitions
_schedule = pytest.StashKey[Schedule]()
_trials = pytest.StashKey[int]()
_followed = pytest.StashKey[bool]()


def add(group: pytest.OptionGroup) -> None:
    """Adds the option."""
    group.addoption(
        "--race-replay",
        metavar="FILE",
        default=None,
        help="run the test that FILE names, under the schedule that a failure wrote there",
    )


def configure(config: pytest.Config) -> None:
    """Reads the file; a bad one ends the session."""
    if config.option.race_replay is None:
        return
    try:
        schedule = Schedule.load(Path(config.option.race_replay))
    except ScheduleError as error:
        pytest.exit(f"--race-replay: {error}", BAD_INPUT)
    if "test" not in schedule.facts:
        pytest.exit(
            f"--race-replay: {config.option.race_replay} names no test; "
            "use 'harness replay' for a schedule that the search has found",
            BAD_INPUT,
        )
    config.stash[_schedule] = schedule


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves only the test that the file names; none of that name ends the session."""
    schedule = config.stash.get(_schedule, None)
    if schedule is None:
        return
    wanted = schedule.facts["test"]
    kept = [item for item in items if _name(item) == wanted]
    if not kept:
        pytest.exit(f"--race-replay: no test here is called {wanted}", BAD_INPUT)
    dropped = [item for item in items if _name(item) != wanted]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def environment(item: pytest.Item) -> dict[str, str]:
    """What the item's next isolated case is given."""
    number = item.stash.get(_trials, 0) + 1
    item.stash[_trials] = number
    schedule = item.config.stash.get(_schedule, None)
    if schedule is None or schedule.facts.get("trial", "1") != str(number):
        return {}
    item.stash[_followed] = True
    if schedule.facts.get("how") == SCRIPTED:
        return {}
    return {VARIABLE: json.dumps({"strategy": "follow", "schedule": str(schedule)})}


def check(item: pytest.Item) -> None:
    """Fails a test that has passed without coming to the case whose schedule it was to repeat."""
    schedule = item.config.stash.get(_schedule, None)
    if schedule is not None and not item.stash.get(_followed, False):
        trial, ran = schedule.facts.get("trial", "1"), item.stash.get(_trials, 0)
        pytest.fail(
            f"--race-replay: the schedule is that of the test's case {trial}, and it ran {ran}",
            pytrace=False,
        )


def save(
    item: pytest.Item,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    record: Mapping[str, Any],
) -> str | None:
    """Writes the schedule that a case passed, and says where; None: there is none, or no place."""
    text = record.get("schedule", {}).get("text")
    if text is None or (folder := _folder(item.config)) is None:
        return None
    number = item.stash.get(_trials, 1)
    facts = {"test": _name(item), "trial": str(number), "verdict": str(judge(record))}
    facts |= Target(*_address(function), CASE, dict(arguments)).facts()
    # Tests of one name may stand in several files; names of parameters may be long.
    safe = re.sub(r"[^\w.-]+", "_", item.name, flags=re.ASCII)[:100]
    which = f"{zlib.crc32(item.nodeid.encode()):08x}" + (f"-{number}" if number > 1 else "")
    path = folder / f"{safe}-{which}.schedule"
    Schedule.parse(text).with_facts(**facts).save(path)
    return str(path)


def _folder(config: pytest.Config) -> Path | None:
    if (report := report_folder(config)) is not None:
        return report / "schedules"
    cache = getattr(config, "cache", None)
    return None if cache is None else Path(cache.mkdir("race"))


def report_folder(config: pytest.Config) -> Path | None:
    """The folder of ``--race-report``, wherever a test has gone meanwhile."""
    given = config.option.race_report
    return None if given is None else config.invocation_params.dir / given


def _name(item: pytest.Item) -> str:
    return without_repetition(item, item.nodeid)


def without_repetition(item: pytest.Item, name: str) -> str:
    """``name`` (the item's own, or its node id) without the number of ``--race-repeat``."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or REPETITION not in callspec.params:
        return name
    parts = callspec.id.split("-")
    parts.remove(f"run{callspec.params[REPETITION]}")
    base = name.removesuffix(f"[{callspec.id}]")
    return f"{base}[{'-'.join(parts)}]" if parts else base
