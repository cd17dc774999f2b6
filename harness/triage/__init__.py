"""Diagnosis of an existing log: which torch, who died, of what, with which confidence.

    >>> from harness.triage import triage_text
    >>> diagnosis = triage_text(open("train.log").read())
    >>> diagnosis.causes[0].id, diagnosis.torch.version

The log's bytes are searched for literals, only what lies round a hit is parsed, and the findings
are judged by rules that are data (`rules/`). Nothing here imports torch. Not covered: core files,
and causes that leave no trace in a text.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from harness.triage.collect import Collector, Group
from harness.triage.diagnosis import Cause, Diagnosis, diagnose
from harness.triage.needles import Needles, needles
from harness.triage.reader import Block, BrokenOff, Unreadable, blocks
from harness.triage.rules import BadRule, load
from harness.triage.scan import lines
from harness.triage.structured import read_trace

__all__ = [
    "BadRule",
    "Cause",
    "Diagnosis",
    "Unreadable",
    "search",
    "triage_paths",
    "triage_text",
]


def search() -> Needles:
    """The literals of a triage: the base and those of the rules."""
    return needles(text for rule in load() for text in rule.literals)


def triage_text(text: str, name: str = "-") -> Diagnosis:
    """Diagnoses a log that is already in memory."""
    wanted = search()
    collector = Collector()
    block = Block(0, text.encode("utf-8", "replace"), True)
    collector.take(name, lines([block], wanted))
    return diagnose(collector, [name], wanted.grep())


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; the second one interrupts as usual.

    An exception would strike anywhere, also between reading a line and understanding it. Outside of
    the main thread nobody is interrupted, and nothing changes.
    """
    pressed: list[int] = []  # not an Event: setting one in a handler can wait for its own thread
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.append(number)

    before = signal.signal(signal.SIGINT, interrupted) or signal.SIG_DFL
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def triage_paths(
    paths: Sequence[str | Path],
    *,
    follow: bool = False,
    idle: float | None = None,
    trace: str | Path | None = None,
    on_new: Callable[[Group], None] | None = None,
) -> Diagnosis:
    """Diagnoses logs (``-``: standard input), one after the other, as one run.

    Args:
        follow: go on at the end of the (one) log, until interrupted; what was read then counts.
        idle: stop following after so many seconds without a new byte.
        trace: a folder of torch's structured trace (TORCH_TRACE), joined with the log.
        on_new: called with each failure that is not like an earlier one, when it is read.

    Raises:
        Unreadable: a log or the folder cannot be read, or a part of a log in which nothing else
            failed; one line.
        ValueError: no path, or several to follow.
    """
    names = [str(path) for path in paths]
    if not names and trace is None:
        raise ValueError("no log is named")
    if follow and len(names) != 1:
        raise ValueError("one log can be followed at a time")
    wanted = search()
    collector = Collector(on_new)
    broken: list[BrokenOff] = []
    with _interrupts() if follow else nullcontext(lambda: False) as stop:
        for name in dict.fromkeys(names):
            source = blocks(name, follow=follow, idle=idle, stop=stop)
            try:
                collector.take(name, lines(source, wanted))
            except BrokenOff as error:
                broken.append(error)
                collector.finish()
    summary = None
    if trace is not None:
        summary = read_trace(Path(trace), collector)
    diagnosis = diagnose(collector, names, wanted.grep(), summary)
    if broken and diagnosis.exit_code == 0:  # what failed may stand in the rest
        raise broken[0]
    diagnosis.unsaid[:0] = map(str, broken)
    return diagnosis
