"""The forced interleavings of the suite, and what torch must have for each.

A script names threads, points and work steps (tests/race/program.py: row length changes at step
4). None depends on luck: see harness/schedule.py.
"""

from __future__ import annotations

DRAFTERS = ("drafter-0", "drafter-1", "drafter-2")

# One thread after the other makes its first step, and so compiles its first row length. Without it
# a control could die early, of the same race, at a place of its own choosing.
FIRST_STEPS = tuple(
    f"{name} {point} step=0" for name in DRAFTERS for point in ("step.begin", "step.end")
)
ALL_WARM = (*FIRST_STEPS, *(f"{name} step.begin step=1" for name in DRAFTERS))

# Warm threads 0 and 2 call compiled code while thread 1, at its second row length, is inside a
# trace of its recompile. All three are warm before it begins, so nobody waits for dynamo's lock.
TRACE_BESIDE_WARM_CALLS = (
    "drafter-0 step.begin step=3",
    "drafter-2 step.begin step=3",
    "drafter-1 step.begin step=4",
    "drafter-1 trace.body step=4",
    "drafter-0 call.arrive step=3",
    "drafter-0 call.settled step=3",
    "drafter-2 call.arrive step=3",
    "drafter-2 call.settled step=3",
    "drafter-1 trace.end step=4",
)


def annotations_overlap(step: int) -> tuple[str, ...]:
    """Two threads find no annotation, both write, both take it away: the second finds nothing.

    Neither takes it away before both have written: that is what the last point is for.
    """
    return tuple(
        f"{name} {point} step={step}"
        for point in ("annotate.tested", "annotate.write", "annotate.body", "annotate.end")
        for name in ("drafter-0", "drafter-1")
    )


# The same with nobody else near, before the two look and until both have left.
ANNOTATIONS_ALONE = (
    *FIRST_STEPS,
    "drafter-0 annotate.arrive step=1",
    "drafter-1 annotate.arrive step=1",
    *annotations_overlap(step=1),
    "drafter-0 annotate.left step=1",
    "drafter-1 annotate.left step=1",
    "drafter-2 step.begin step=1",
)

# One row length only: thread 1's first compile, beside thread 0 which is warm.
FIRST_COMPILE_BESIDE_WARM_CALL = (
    "drafter-0 step.begin step=2",
    "drafter-1 call.arrive step=0",
    "drafter-1 trace.body step=0",
    "drafter-0 call.arrive step=2",
    "drafter-0 call.settled step=2",
    "drafter-1 trace.end step=0",
)

# A make_fx that holds no lock is parked in its body while the warm threads call, one after the
# other: eager flex_attention traces too, and two such traces at once fail in another way.
FOREIGN_TRACE = (
    *ALL_WARM,
    *(f"{name} step.begin step=3" for name in DRAFTERS),
    "tracer trace.begin",
    "tracer trace.body",
    *(
        f"{name} {point} step=3"
        for name in DRAFTERS
        for point in ("call.arrive", "call.settled", "step.end")
    ),
    "tracer trace.end",
)


def masks_annotate() -> bool:
    """Whether building a BlockMask enters ``torch.fx.traceback.annotate`` on this torch."""
    import inspect

    from torch.nn.attention import flex_attention as flex

    return "annotate(" in inspect.getsource(flex._dense_to_ordered)
