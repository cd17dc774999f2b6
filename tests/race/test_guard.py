"""Behind the guard three drafters complete, and the danger was really there.

Every case: all threads complete; outputs and gradients equal the single-threaded SDPA reference;
flex_attention never ran uncompiled; every probe is at rest afterwards and the canaries live; the
number of compiles is the planned one; and compiled calls were entered while another thread held
the state, except under guards that allow no overlap by design.
"""

from __future__ import annotations

import cases
import pytest
import scripts
from facts import UNFIX

from harness import Expectation, Verdict

pytestmark = pytest.mark.race

STARTS = ("staggered", "together")
EXCLUSIVE = ("serial", "lock")


def expectation(guard: str) -> Expectation:
    annotation = ("annotation",) if scripts.masks_annotate() else ()
    if guard in EXCLUSIVE:  # no compiled call beside a trace; masks are still built side by side
        return Expectation(Verdict.COMPLETED, exposed=annotation, unexposed=("fx-trace",))
    return Expectation(Verdict.COMPLETED, exposed=("fx-trace", *annotation))


@pytest.mark.parametrize("start", STARTS)
def test_guard(race_trial, race_device, guard, start):
    """With torch's own repairs of the FX flag taken out, where it has them."""
    race_trial(
        cases.guarded,
        expect=expectation(guard),
        guard=guard,
        start=start,
        device=race_device,
        unfix=UNFIX,
    )


@pytest.mark.skipif(not UNFIX, reason="this torch has no repair: test_guard runs it as it is")
@pytest.mark.parametrize("start", STARTS)
def test_guard_on_torch_as_it_is(race_trial, race_device, start):
    """As users have it."""
    race_trial(
        cases.guarded,
        expect=expectation("auto"),
        guard="auto",
        start=start,
        device=race_device,
        unfix=[],
    )
