"""Short logs for each cause, in other forms than the corpus: the rules know more than it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness.triage import rules, triage_text

VARIANTS = tomllib.loads((Path(__file__).parent / "variants.toml").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_gets_its_cause_and_no_other_one_with_confidence(name):
    causes = triage_text(VARIANTS[name]["text"]).causes
    expected = VARIANTS[name]["cause"]
    assert (causes[0].id if causes else "none") == expected
    assert not [c.id for c in causes if c.confidence == "high" and c.id != expected]


def test_every_rule_has_a_variant():
    named = {row["cause"] for row in VARIANTS.values()}
    assert {rule.id for rule in rules.load()} <= named
