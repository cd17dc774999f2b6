"""Three drafters learn from features of a real target over real text, in three threads."""

from __future__ import annotations

import cases
import pytest

from harness import Expectation, Verdict

pytestmark = pytest.mark.race


@pytest.mark.parametrize("start", ["staggered", "together"])
def test_real_input(race_trial, race_device, start):
    """Qwen3 features of the standard library's text, as bytes; every drafter's loss goes down."""
    race_trial(
        cases.real_input,
        expect=Expectation(Verdict.COMPLETED, exposed=("fx-trace",)),
        start=start,
        device=race_device,
    )
