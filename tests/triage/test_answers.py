"""The corpus is what it says: causes are known, logs have answers and answers have logs.

What triage makes of the logs is in ``test_corpus.py``; here nothing is diagnosed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HALVES = ("held_out", "open")
SETS = (*HALVES, "adversarial")
MINIMUM = 30


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


CAUSES = _load("causes.toml")
ANSWERS = {half: _load(f"{half}/answers.toml") for half in SETS}
ROWS = [(half, name) for half in SETS for name in ANSWERS[half]]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_says_what_it_means(cause: str) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cause)
    entry = CAUSES[cause]
    assert set(entry) <= {"title", "meaning", "rows", "parts"}
    assert entry["title"] and entry["meaning"]


def test_no_row_of_the_catalogue_is_left_without_a_cause() -> None:
    named = {row for entry in CAUSES.values() for row in entry.get("rows", ())}
    absent = {19, 31, 34, 67, 73, 77, 82}  # numbers that the catalogue does not use
    assert named == set(range(1, 101)) - absent


@pytest.mark.parametrize("half", SETS)
def test_each_log_has_one_answer(half: str) -> None:
    logs = {path.stem for path in (HERE / half).glob("*.log")}
    assert logs == set(ANSWERS[half])
    assert len(logs) >= (MINIMUM if half in HALVES else 20)


def test_no_log_is_in_two_sets() -> None:
    names = [name for _, name in ROWS]
    assert len(names) == len(set(names))
    texts = [(HERE / half / f"{name}.log").read_bytes() for half, name in ROWS]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize(("half", "name"), ROWS)
def test_an_answer_agrees_with_itself(half: str, name: str) -> None:
    answer = ANSWERS[half][name]
    assert {"cause", "raise_in_text", "exit", "origin"} <= set(answer)
    for cause in (answer["cause"], *answer.get("also", ()), *answer.get("consequences", ())):
        assert cause in CAUSES and cause != "not-in-a-log"
    assert answer["exit"] == (0 if answer["cause"] == "none" else 1)
    assert ("torch" in answer) == ("torch_how" in answer)
    assert answer.get("at_most") in {None, "low", "medium"}
    assert answer.get("torch_how") in {None, "stated", "inferred"}
    if "failing" in answer:
        assert answer["count"] == len(answer["failing"])
    if answer["cause"] == "none":
        assert not answer.get("failing")


@pytest.mark.parametrize(("half", "name"), ROWS)
def test_what_an_answer_claims_stands_in_the_text(half: str, name: str) -> None:
    answer = ANSWERS[half][name]
    text = (HERE / half / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    if answer.get("torch_how") == "stated":
        assert str(answer["torch"]) in text
    for who in answer.get("failing", ()):
        rank = re.fullmatch(r"rank(\d+)", who)
        spellings = (who, f"Rank {rank[1]}", f"rank      : {rank[1]}") if rank else (who,)
        assert who == "MainThread" or any(spelling in text for spelling in spellings)


@pytest.mark.parametrize("half", HALVES)
def test_a_half_is_more_than_one_easy_kind(half: str) -> None:
    causes = {answer["cause"] for answer in ANSWERS[half].values()}
    assert len(causes) >= 20 and {"none", "unknown", "fx-flag-other-thread"} <= causes


@pytest.mark.parametrize(("half", "name"), ROWS)
def test_no_log_shows_the_machine_it_was_made_on(half: str, name: str) -> None:
    text = (HERE / half / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    places = set(re.findall(r'File "(/[^/"]+/[^/"]+)', text))
    assert places <= {"/usr/lib", "/usr/local"} | {
        place for place in places if re.match(r"/(opt|srv|app|kaggle)/|/home/user$", place)
    }
