"""The names of the points at which the harness looks or waits, and the event that one sends."""

from __future__ import annotations

from dataclasses import dataclass

# name -> what it means. `schedule` scripts and reports use these names and no others.
POINTS: dict[str, str] = {
    "step.begin": "a crew member begins a work step",
    "step.end": "a crew member has finished a work step",
    "call.arrive": "a thread is about to enter a compiled function (outermost call only)",
    "call.enter": "it does so now: what is recorded here is what the call meets",
    "call.checked": "the wrapper's checks have let the thread pass",
    "call.settled": "the first of: checked, or the call has ended without being checked",
    "call.exit": "the compiled function has returned or raised",
    "trace.begin": "a thread is about to enter Tracer.trace",
    "trace.body": "the traced function (not a module) runs: the flag is up, nn.Module patched",
    "trace.end": "the traced function has ended, Tracer.trace has not",
    "trace.left": "Tracer.trace has ended and put its state back",
    "annotate.tested": "torch.fx.traceback.annotate has looked whether an annotation is there",
    "annotate.write": "annotate is about to write",
    "annotate.body": "the block under annotate runs",
    "annotate.left": "annotate has put its state back (or failed to)",
    "flex.eager": "flex_attention runs its uncompiled path",
    "lock.wait": "a thread asks for dynamo's compile_lock",
    "lock.held": "a thread has taken dynamo's compile_lock",
    "lock.released": "a thread has given dynamo's compile_lock back",
}


@dataclass(frozen=True)
class Event:
    """A thread is at a point.

    Attributes:
        point: a key of :data:`POINTS`.
        thread: the thread's name.
        step: the crew member's work step, or None outside a crew.
        error: the exception that is passing the point, if one is.
    """

    point: str
    thread: str
    step: int | None = None
    error: BaseException | None = None
