"""docs/findings.md says what the specimens say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from specimen import Shows, facts, names

TEXT = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
ROWS = {
    name: tuple(rest)
    for name, *rest in re.findall(
        r"^\| \d+ \| \[(\w+)\]\([^)]*\) \| [^|]+" + 4 * r" \| ([^|]+)" + r" \|", TEXT, re.M
    )
}
MEASURED = ("2.9", "2.11", "2.13", "2.14", "2.15")
CLEAN = vars(Shows()) | {"refused": 0}
OURS = [name for name in ROWS if name in names()]


@pytest.mark.parametrize("name", OURS)
def test_the_table_is_what_is_tested(name):
    verdict, state, torch, guard = ROWS[name]
    specimen = facts(name)
    shows = specimen.expected("2.13.0")
    assert verdict.split(",")[0] == shows.verdict
    assert state.strip("`") == specimen.state or "`" not in state
    first, last = (re.split(r" to | (?=on)", torch) * 2)[:2]
    known = {version: specimen.expected(version) for version in MEASURED}
    shown = [v for v, shows in known.items() if shows and vars(shows) | {"refused": 0} != CLEAN]
    assert shown[0] == first and shown[-1] == (MEASURED[-1] if last == "on" else last)
    assert len(shown) == MEASURED.index(shown[-1]) - MEASURED.index(first) + 1, "a gap"
    guarded = specimen.behind_guard("2.13.0")
    clean = guarded is not None and guarded.verdict == "completed"
    if guard == "none":
        assert not clean
    elif guard in ("covered", "covered: refuses the overlap"):
        assert clean and guarded.refused == (guard != "covered")


def test_every_race_of_the_catalogue_is_in_the_table():
    """Those that are clean on 2.13.0 are named below it."""
    for name in names():
        assert name in ROWS or re.search(rf"\b{name}\b", TEXT), name
        if facts(name).expected("2.13.0").verdict != "completed" and facts(name).schedule:
            assert name in ROWS, name


def test_the_findings_are_distinct():
    """Another state or another verdict: at least ten."""
    assert len({(verdict, state) for verdict, state, *_ in ROWS.values()}) >= 10


def test_the_tests_that_the_document_names_exist():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"\btest_[a-z_]+(?=[`\[])", TEXT):
        assert f"def {name}(" in source, name
