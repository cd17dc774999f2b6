"""Triage against the corpus: the right cause, and never a wrong one said with confidence.

Each log is a case of its own, so a report names those that are wrong; the two aggregates are what
the project promises per set. Cases that are known to be wrong stand in ``known_wrong.toml`` and
still count as wrong. Not here: speed, memory, mutated input, the roles of single frames.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness.triage import triage_text

HERE = Path(__file__).parent
SETS = ("held_out", "open", "adversarial")
RIGHT_SHARE = 0.95
CONFIDENCES = ("high", "medium", "low")


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


KNOWN_WRONG: dict[str, list[str]] = _load("known_wrong.toml")
ANSWERS = {half: _load(f"{half}/answers.toml") for half in SETS}
CASES = [(half, name) for half in SETS for name in ANSWERS[half]]
every_log = pytest.mark.parametrize(("half", "name"), CASES)


@functools.cache
def _diagnosis(half: str, name: str) -> Any:
    # Carriage returns of progress bars are part of a log, so no universal newlines.
    text = (HERE / half / f"{name}.log").read_bytes().decode("utf-8", "replace")
    return triage_text(text, name=name)


def _top(half: str, name: str) -> str:
    causes = _diagnosis(half, name).causes
    return causes[0].id if causes else "none"


def _accepted(half: str, name: str) -> set[str]:
    answer = ANSWERS[half][name]
    return {answer["cause"], *answer.get("also", ())}


def _standing(half: str, name: str) -> set[str]:
    """What may be said with confidence: the cause, and what follows from it in the same text."""
    return _accepted(half, name) | set(ANSWERS[half][name].get("consequences", ()))


def _same_version(told: str, expected: str) -> bool:
    """``2.11`` stands for each of its patch releases, ``2.11.0`` only for itself."""
    parts = expected.split(".")
    return told.split("+")[0].split(".")[: len(parts)] == parts


def _version_is_right(half: str, name: str) -> bool:
    answer, torch = ANSWERS[half][name], _diagnosis(half, name).torch
    expected = answer.get("torch")
    read_off = torch.version if torch.how in {"stated", "inferred"} else None
    if expected is None:
        return read_off is None
    if isinstance(expected, list):  # the text fits several, so not naming one is right too
        return read_off is None or any(_same_version(read_off, one) for one in expected)
    return (
        read_off is not None
        and _same_version(read_off, expected)
        and torch.how == answer["torch_how"]
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _failing_are_right(half: str, name: str) -> bool:
    """As many as expected, and each by its name, with whatever triage adds to it."""
    answer, failures = ANSWERS[half][name], _diagnosis(half, name).failures
    if "count" not in answer:
        return True
    if "failing" not in answer:
        return answer["count"] == sum(group.count for group in failures)
    told = {_plain(thread) for group in failures for thread in group.threads}
    return len(told) == answer["count"] and all(
        any(_plain(who) in one for one in told) for who in answer["failing"]
    )


def _judge(kind: str, name: str, right: bool, said: object) -> None:
    if name in KNOWN_WRONG[kind]:
        assert not right, f"{name} is right now: take it out of known_wrong.toml, {kind}"
    else:
        assert right, said


@every_log
def test_cause(half: str, name: str) -> None:
    right = _top(half, name) in _accepted(half, name)
    _judge("cause", name, right, _diagnosis(half, name).causes)


@every_log
def test_exit_code(half: str, name: str) -> None:
    code = _diagnosis(half, name).exit_code
    _judge("exit", name, code == ANSWERS[half][name]["exit"], code)


@every_log
def test_torch_version(half: str, name: str) -> None:
    _judge("version", name, _version_is_right(half, name), _diagnosis(half, name).torch)


@every_log
def test_who_failed(half: str, name: str) -> None:
    _judge("who", name, _failing_are_right(half, name), _diagnosis(half, name).failures)


@every_log
def test_confidence_is_stated(half: str, name: str) -> None:
    assert {cause.confidence for cause in _diagnosis(half, name).causes} <= set(CONFIDENCES)


@pytest.mark.parametrize(
    ("half", "name"), [case for case in CASES if "at_most" in ANSWERS[case[0]][case[1]]]
)
def test_no_more_confidence_than_the_text_allows(half: str, name: str) -> None:
    said = _diagnosis(half, name).causes[0].confidence
    assert CONFIDENCES.index(said) >= CONFIDENCES.index(ANSWERS[half][name]["at_most"])


@pytest.mark.parametrize("half", SETS)
def test_share_of_right_causes(half: str) -> None:
    wrong = {
        name: _top(half, name)
        for name in ANSWERS[half]
        if _top(half, name) not in _accepted(half, name)
    }
    assert 1 - len(wrong) / len(ANSWERS[half]) >= RIGHT_SHARE, wrong


@pytest.mark.parametrize("half", SETS)
def test_no_wrong_answer_is_given_with_high_confidence(half: str) -> None:
    wrong = [
        (name, cause.id)
        for name in ANSWERS[half]
        for cause in _diagnosis(half, name).causes
        if cause.confidence == "high" and cause.id not in _standing(half, name)
    ]
    assert not wrong


def test_each_known_wrong_case_is_a_case() -> None:
    names = {name for _, name in CASES}
    assert set(KNOWN_WRONG) == {"cause", "exit", "version", "who"}
    assert {name for listed in KNOWN_WRONG.values() for name in listed} <= names
