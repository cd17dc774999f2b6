"""Which shared state an exception speaks of, and what its holder must have been inside of.

A table, first match wins. An exception that no row knows gets no culprit: that another thread was
compiling at that moment is told as what it is, a coincidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.capture import CapturedError

TRACE, ANNOTATION, COMPILE = "trace", "annotation", "compile lock"


@dataclass(frozen=True)
class Rule:
    """One kind of failure.

    Attributes:
        state: the probe's name (or the state's, where it has no probe).
        spans: what a holder is inside of while it has that state in hand, likeliest first.
        message: text in the exception's message ("" for any).
        file: end of the raising frame's file ("" for any).
        function: the raising frame's function ("" for any).
        source: the public report.
    """

    state: str
    spans: tuple[str, ...]
    message: str = ""
    file: str = ""
    function: str = ""
    source: str = ""

    def fits(self, error: CapturedError) -> bool:
        frame = error.raising
        return (
            self.message in error.message
            and (not self.file or (frame is not None and frame.file.endswith(self.file)))
            and (not self.function or (frame is not None and frame.function == self.function))
        )


RULES = (
    Rule(
        "fx-tracing-flag",
        (TRACE,),
        message="FX to symbolically trace",
        file="torch/_dynamo/eval_frame.py",
        source="pytorch#126024",
    ),
    Rule(  # a compile exchanges the dict as well
        "traceback-meta",
        (ANNOTATION, COMPILE, TRACE),
        file="torch/fx/traceback.py",
        function="annotate",
    ),
    Rule("fx-patcher", (TRACE,), message="CURRENT_PATCHER", source="pytorch#168042"),
    Rule(
        "module-getattr",
        (TRACE,),
        message="is not installed as a submodule",
        source="pytorch#112775",
    ),
    Rule("make-fx-tracer", (TRACE,), file="torch/fx/experimental/proxy_tensor.py"),
    Rule("metrics-context", (COMPILE,), message="have already been set in the current context"),
)


def rule_for(error: CapturedError) -> Rule | None:
    """The row that knows this exception or one that it hides; None where no row does."""
    chain: Iterable[CapturedError] = (error, *error.causes)
    return next((rule for link in chain for rule in RULES if rule.fits(link)), None)
