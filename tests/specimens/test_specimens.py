"""Every specimen shows what it states: forced, in turn, under the guard, with a repair taken out.

One fresh process per run. ``nox -s specimens`` runs this folder.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import replay
from specimen import Shows, facts, names

TORCH = version("torch")
ALL = {name: facts(name) for name in names()}
FORCED = [name for name, one in ALL.items() if one.expected(TORCH) is not None]
GUARDED = [name for name in FORCED if ALL[name].behind_guard(TORCH) is not None]


def unfixed_here() -> list[str]:
    """Those whose repair this torch has: as it is, they show another verdict."""
    return [name for name in FORCED if ALL[name].unfix_here(TORCH)]


def in_turn_here() -> list[str]:
    """Those that take an overlap and show something."""
    return [name for name in FORCED if ALL[name].in_turn and ALL[name].expected(TORCH) != Shows()]


def require(shows: Shows, record: dict) -> None:
    """Fails with all differences and the process's own end."""
    if unmet := shows.unmet(record):
        pytest.fail("\n".join((*unmet, record["process"]["error"])), pytrace=False)


@pytest.mark.parametrize("name", FORCED)
def test_forced(isolation, name):
    expected = ALL[name].expected(TORCH)
    require(expected, replay.run(name, isolation))


@pytest.mark.parametrize("name", in_turn_here())
def test_in_turn(isolation, name):
    """The true negative: the same threads, one after the other."""
    require(Shows(), replay.run(name, isolation, order="in turn"))


@pytest.mark.parametrize("name", unfixed_here())
def test_unfixed(isolation, name):
    """With torch's own repair taken out, the race is back."""
    specimen = ALL[name]
    require(specimen.unfixed, replay.run(name, isolation, unfix=list(specimen.unfix)))


@pytest.mark.parametrize("name", GUARDED)
def test_guarded(isolation, name):
    """Under the guard the same schedule shows what the specimen states: mostly nothing."""
    specimen = ALL[name]
    record = replay.run(name, isolation, unfix=specimen.unfix_here(TORCH), guard="auto")
    require(specimen.behind_guard(TORCH), record)


def test_a_specimen_that_shows_something_else_is_refused(isolation):
    """The control of this file: a wrong statement about a race must fail."""
    record = replay.run("annotation_left", isolation)
    assert Shows().unmet(record) and Shows("raised").unmet(record)
    assert Shows("sticky state").unmet(record), "a stuck probe that was not stated"
    assert Shows("sticky state", stuck=("traceback-meta",), later={"a": 1}).unmet(record)
    assert not Shows("sticky state", stuck=("traceback-meta",)).unmet(record)
    died = replay.run("annotation_key_error", isolation)
    assert Shows("raised").unmet(died), "an exception that was not stated"
    assert Shows("raised", raises={"thread-0": "KeyError: 'custom'"}).unmet(died)


def test_there_are_specimens_of_every_verdict():
    """But for the hang, which no row of the catalogue shows on a CPU."""
    verdicts = {shows.verdict for one in ALL.values() for shows in one.expect.values()}
    assert len(ALL) >= 20
    assert verdicts >= {
        "raised",
        "native crash",
        "silently eager",
        "spurious recompile",
        "sticky state",
        "wrong number",
        "completed",
    }


@pytest.mark.parametrize("name", list(ALL))
def test_what_is_clean_says_why(name):
    """A clean expectation without a reason would be a race that nobody has looked for."""
    for since, shows in ALL[name].expect.items():
        assert shows.verdict != "completed" or since in ALL[name].absent, (name, since)
