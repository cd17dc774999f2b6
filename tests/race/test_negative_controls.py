"""What does not help, must be seen not to help: each control has to be caught, in its own way.

Caught means: the verdict, the exception, the raising frame and the held state that are listed
for that control. Any other failure is a harness error, so that one bug cannot stand in for
another.
"""

from __future__ import annotations

import cases
import pytest
import scripts
from facts import UNFIX

from harness import Expectation, Verdict

pytestmark = pytest.mark.race

STARTS = ("staggered", "together")

KILLED_BY_FX_FLAG = Expectation(
    Verdict.RAISED,
    exception="RuntimeError",
    message="Detected that you are using FX to symbolically trace a dynamo-optimized function",
    frame="torch/_dynamo/eval_frame.py:compile_wrapper",
    state="fx-tracing-flag",
    exposed=("fx-trace",),
)
KILLED_BY_ANNOTATION = Expectation(
    Verdict.RAISED,
    exception="KeyError",
    message="custom",
    frame="torch/fx/traceback.py:annotate",
    state="traceback-meta",
    exposed=("annotation",),
)
RAN_EAGER = Expectation(Verdict.SILENTLY_EAGER, exposed=("fx-trace",))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "repair",
    [
        "no-guard",
        "lock-per-thread",
        "lock-first-call",
        "sys-modules-shim",
        "reader-after-wrapping",
    ],
)
def test_fx_flag(race_trial, race_device, repair, start):
    """pytorch#126024: the warm threads die while another traces, whatever of these is done."""
    race_trial(
        cases.control,
        expect=KILLED_BY_FX_FLAG,
        kind="control",
        name=repair,
        start=start,
        device=race_device,
        unfix=UNFIX,
    )


@pytest.mark.skipif(not UNFIX, reason="this torch has no repair: test_fx_flag runs it as it is")
@pytest.mark.parametrize("start", STARTS)
def test_fx_flag_on_torch_as_it_is(race_trial, race_device, start):
    """The true negative: with torch's repair in place, the same overlap kills nobody, unguarded."""
    race_trial(
        cases.control,
        expect=Expectation(Verdict.COMPLETED, exposed=("fx-trace",)),
        kind="repaired",
        name="no-guard",
        start=start,
        device=race_device,
        unfix=[],
    )


@pytest.mark.parametrize("start", STARTS)
def test_nested_trace_off(race_trial, race_device, start):
    """``error_on_nested_fx_trace=False`` takes the error away, and the compiled code with it."""
    race_trial(
        cases.control,
        expect=RAN_EAGER,
        kind="control",
        name="nested-trace-off",
        start=start,
        device=race_device,
        unfix=UNFIX,
    )


@pytest.mark.skipif(
    not scripts.masks_annotate(), reason="on this torch, building a BlockMask does not annotate"
)
@pytest.mark.parametrize("start", STARTS)
def test_annotation(race_trial, race_device, start):
    """torch as it is, no guard: two threads build masks, one dies of ``KeyError: 'custom'``."""
    race_trial(
        cases.control,
        expect=KILLED_BY_ANNOTATION,
        kind="control",
        name="annotation",
        start=start,
        device=race_device,
        unfix=[],
    )
