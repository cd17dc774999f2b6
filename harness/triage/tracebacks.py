"""Python tracebacks out of a stream of lines: chained, grouped, interleaved, cut at either end.

Covered: the interpreter's, `threading.excepthook`'s and `logging`'s form; "During handling" and
"The above exception" chains; exception groups; "Original Traceback" inside a message; carets and
missing source lines; "[Previous line repeated N more times]"; several threads that print into one
stream line by line; frames without header or last line.

IPython's form is read too, of rich's boxes only the frames. Not covered: two threads whose
characters mix inside one line.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from harness.triage.events import (
    FRAMES_KEPT,
    MESSAGE_CHARACTERS,
    Event,
    Frame,
    Kind,
    Place,
    shorten,
)
from harness.triage.lines import Line
from harness.triage.words import DECORATION, handled, named_in

# What services, terminals and people put where they leave lines out.
_LEFT_OUT = re.compile(
    r"^\s*[\[<(]?(?:\.\.\.|\u2026|snip)[\]>)]?\s*$"
    r"|\b(?:lines|frames|output|log)\b.{0,40}\b(?:omitted|truncated|skipped|hidden|cut|removed)\b"
    r"|\b(?:omitted|truncated|skipped|skipping)\b.{0,40}\b(?:lines|frames|output|log)\b",
    re.I,
)
# A traceback of which nothing more came for this many lines of its stream is taken as cut off.
PATIENCE_LINES = 400
MESSAGE_LINES = 40

HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"]{1,600})", line (\d{1,8})(?:, in (\S.{0,200}))?\s*$')
_RICH_FRAME = re.compile(r"^[│|]?\s*(/[^\s:]{1,400}\.py):(\d{1,7}) in (\w{1,100})\s*[│|]?\s*$")
_NOTEBOOK_FRAME = re.compile(r"^File (/[^\s:]{1,400}):(\d{1,7}), in ([^\s(]{1,200})(?:\(.*)?$")
_ARROW = re.compile(r"^-+> ?\d+ (.*)$")
_NUMBERED = re.compile(r"^ +\d+ ")
_CARETS = re.compile(r"^[\s~^]+$")
_REPEATED = re.compile(r"^\s*\[Previous line repeated (\d+) more times?\]")
_CHAINED = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]{0,200})(?:: ?(.*))?$")
_KNOWN_ENDS = (
    "Error", "Exception", "Exit", "Interrupt", "Warning", "Timeout", "Group", "StopIteration",
    "Unsupported", "Empty", "Full", "Failed", "Expired", "Refused", "Abort", "Again", "Hit",
)  # fmt: skip
# The whole is the name: Python calls a thread "Thread-3 (target)".
_IN_THREAD = re.compile(r"Exception in thread ([^\n:(]{1,120}(?:\([^)\n]{1,80}\))?):")
_MEMBER = re.compile(r"^ *(?:\| *)*\+(?:-\+)?-+ \d+ -+")
_GROUP = "ExceptionGroup"
# What stands behind these is no traceback of its own: dynamo's, and that of logging's own errors.
_USER_CODE = ("from user code", "Call stack:")
_LOGGING_ENDS = "Arguments: "
# How the messages of torch go on; others only when indented, or announced by a colon.
_CONTINUATIONS = (
    "  ", *_USER_CODE, "Set TORCH", "You can suppress", "To ", "CUDA kernel errors",
    "For debugging", "Compile with", "Device-side", "Exception raised from",
    "While executing", "Original traceback",
)  # fmt: skip


_Key = tuple[str | int, ...]
_END: _Key = ("",)
# Functions at which the stack of a thread or of a program begins.
_STARTS = {"_bootstrap", "_bootstrap_inner", "<module>"}
LEARNED = 5000


@dataclass(slots=True)
class _Open:
    """A traceback of which the last line has not come."""

    place: Place
    header: bool
    thread: str | None = None
    rank: str | None = None
    time: str | None = None
    context: str = ""
    level: str | None = None
    compile_id: str | None = None
    frames: list[list[str | int]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    cause: Event | None = None
    last_line: int = 0
    logged: bool = False  # by a logger, as something less than an error
    cut: bool = False  # frames were left out in its middle
    inner: bool = False  # "Original Traceback" in the message of another one

    def last_key(self) -> _Key:
        return _key(self.frames[-1]) if self.frames else ()


@dataclass(slots=True)
class _Closed:
    """An exception whose message may go on."""

    event: Event
    lines: int = 0
    blank: bool = False
    user_code: bool = False


class Tracebacks:
    """The tracebacks of one stream. Feed it lines; it gives the exceptions that are complete."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[_Open] = []
        self._closed: _Closed | None = None
        self._names: deque[str] = deque()
        self._no_source: deque[list[str | int]] = deque()
        self._link: Event | None = None
        self._outer: Event | None = None
        self._behind: dict[_Key, set[_Key]] = {}  # frame -> what was seen behind it
        self._sources: dict[_Key, str] = {}
        self._last_frame: list[str | int] | None = None
        self._lines = 0
        self._contiguous = False

    @property
    def busy(self) -> bool:
        """Whether the next line may belong to a traceback."""
        return bool(self._open)

    @property
    def reading(self) -> bool:
        """Whether a traceback is open, or the message of the last one may go on."""
        return bool(self._open) or self._closed is not None

    def gap(self) -> None:
        """Lines were left out here."""
        self._contiguous = False

    def feed(self, line: Line, context: Line | None) -> tuple[bool, list[Event]]:
        """Whether the line was part of a traceback, and what it completed.

        ``context`` is the line that came before in the log; it may name the thread.
        """
        self._lines += 1
        out: list[Event] = []
        text = line.text
        if self._open and self._lines - self._open[0].last_line > PATIENCE_LINES:
            out += self._give_up(self._open.pop(0))
        body = DECORATION.sub("", text) if text.lstrip(" ")[:1] in ("|", "+") else text
        if HEADER in text or "Traceback (most recent call first)" in text:
            out += self._header(line, body, context)
            return True, out
        if "Exception in thread" in text:
            found = _IN_THREAD.findall(text)
            if found:
                out += self._settle()
                self._names.extend(name.strip() for name in found)
                return True, out
        frame = _frame_in(body)
        if frame:
            self._frame(frame, line)
            return True, out
        if self._closed is not None and any(marker in text for marker in _CHAINED):
            self._link = self._closed.event
            self._closed = None
            return True, out
        if self._open and self._part_of_open(line, body, out):
            return True, out
        if self._closed is not None:
            if self._closed.event.type.endswith(_GROUP) and _MEMBER.match(text):
                self._closed.event.details["members"] = True
            if self._continues(line, body):
                return True, out
            out += self._settle()
        return False, out

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        out = self._settle()
        for opened in self._open:
            out += self._give_up(opened)
        self._open.clear()
        return out

    # --- the parts -------------------------------------------------------------------------------

    def _header(self, line: Line, body: str, context: Line | None) -> list[Event]:
        inner = "Original Traceback" in body and self._closed is not None
        out: list[Event] = []
        if inner and self._closed is not None:
            self._outer = self._closed.event
            self._closed = None
        elif self._link is None:
            out = self._settle()
        opened = _Open(
            line.place(self.name), True, line.thread, line.rank, line.time,
            level=line.level, compile_id=line.compile_id, cause=self._link,
            last_line=self._lines, inner=inner, logged=line.level in ("DEBUG", "WARNING"),
        )  # fmt: skip
        self._link = None
        before = body.partition("Traceback (most")[0].strip()
        if self._names:
            opened.thread = self._names.popleft()
            opened.context = f"Exception in thread {opened.thread}"
        elif opened.cause is not None:
            opened.thread = opened.thread or opened.cause.thread
            opened.context, opened.level = opened.cause.context, line.level
        elif (
            before
            and not before.startswith(("Original", "Exception Group", "+"))
            and not (before.endswith(_KNOWN_ENDS) and " " not in before)
        ):
            opened.context = before
        elif context is not None:
            opened.context = context.text
            opened.level = opened.level or context.level
            opened.thread = opened.thread or context.thread
            opened.rank = opened.rank if opened.rank is not None else context.rank
            opened.time = opened.time or context.time
            opened.compile_id = opened.compile_id or context.compile_id
        if opened.time is None and context is not None:
            opened.time = context.time
        if opened.thread is None:
            opened.thread = named_in(opened.context)
        self._open.append(opened)
        self._contiguous = True
        return out

    def _frame(self, found: re.Match[str], line: Line) -> None:
        path, number, function = found.groups()
        name = (function or "").strip().rpartition("<locals>.")[2]
        frame: list[str | int] = [shorten(path), int(number), name, ""]
        if not self._open:
            if self._closed is not None and self._closed.user_code:
                users = self._closed.event.details.setdefault("user_code", [])
                if len(users) < FRAMES_KEPT:
                    users.append(f"{frame[0]}:{frame[1]} {frame[2]}".rstrip())
                self._closed.lines += 1
                return
            self._open.append(
                _Open(line.place(self.name), False, line.thread, line.rank, line.time)
            )
        target = self._owner(frame)
        self._learn(target, _key(frame))
        target.last_line = self._lines
        self._last_frame = frame
        if len(target.frames) >= FRAMES_KEPT:
            # The ends tell more than the middle.
            del target.frames[FRAMES_KEPT // 2], target.places[FRAMES_KEPT // 2]
            target.cut = True
        target.frames.append(frame)
        target.places.append(line.place(self.name))
        self._no_source.append(frame)
        if len(self._no_source) > 8:
            self._no_source.popleft()
        self._contiguous = True

    def _owner(self, frame: list[str | int]) -> _Open:
        """Which of several open tracebacks a frame continues.

        A stack begins where a thread begins. Threads that fail alike print alike: a frame that was
        seen behind another one is taken to be behind it again, in the traceback that waits longest.
        """
        last = max(self._open, key=lambda opened: opened.last_line)
        if len(self._open) == 1:
            return last
        if frame[2] in _STARTS:
            return next((opened for opened in self._open if not opened.frames), last)
        known = [o for o in self._open if _key(frame) in self._behind.get(o.last_key(), ())]
        return min(known, key=lambda opened: opened.last_line) if known else last

    def _ending(self) -> _Open:
        """Which of several open tracebacks a last line ends."""
        with_frames = [opened for opened in self._open if opened.frames] or self._open
        known = [o for o in with_frames if _END in self._behind.get(o.last_key(), ())]
        if known:
            return known[0]
        return max(with_frames, key=lambda opened: len(opened.frames))  # the first of the deepest

    def _learn(self, opened: _Open, key: _Key) -> None:
        if len(self._behind) < LEARNED:
            self._behind.setdefault(opened.last_key(), set()).add(key)

    def _give_source(self, text: str) -> None:
        """A source line goes to the frame that waits for it; of different ones to none."""
        waiting = self._no_source
        if len({_key(frame) for frame in waiting}) > 1:
            known = next((f for f in waiting if self._sources.get(_key(f)) == text), None)
            if known is None and waiting[-1] is not self._last_frame:
                waiting.clear()
                return
            frame = known if known is not None else waiting[-1]
            waiting.remove(frame)
        else:
            frame = waiting.popleft()
        frame[3] = text
        if len(self._sources) < LEARNED:
            self._sources[_key(frame)] = text

    def _part_of_open(self, line: Line, body: str, out: list[Event]) -> bool:
        repeated = _REPEATED.match(body)
        if repeated:
            return True
        arrow = _ARROW.match(body)
        if arrow and self._no_source:
            self._give_source(arrow[1].strip()[:300])
            return True
        if body[:2] == "  " and body.strip():
            if _CARETS.match(body) or _NUMBERED.match(body):
                return True
            if self._no_source and self._contiguous:
                self._give_source(body.strip()[:300])
                return True
            return False
        if _LEFT_OUT.search(body):
            for one in self._open:
                one.cut = True
        found = _LAST_LINE.match(body)
        if found is None or not self._is_last_line(found):
            self._contiguous = False
            return False
        opened = self._ending()
        self._learn(opened, _END)
        if not opened.header and not opened.frames:
            return False
        out += self._close(opened, found, line)
        return True

    def _is_last_line(self, found: re.Match[str]) -> bool:
        name, message = found.groups()
        last = name.rpartition(".")[2]
        if last.endswith(_KNOWN_ENDS) or (name.count(".") and message is not None):
            return last[:1].isupper() or "." in name
        return self._contiguous and (last[:1].isupper() or "." in name) and message is not None

    def _close(self, opened: _Open, found: re.Match[str], line: Line) -> list[Event]:
        out = self._settle()
        self._open.remove(opened)
        frames = tuple(_made(frame) for frame in opened.frames)
        event = Event(
            Kind.EXCEPTION,
            opened.place,
            type=found[1],
            message=(found[2] or "")[:MESSAGE_CHARACTERS],
            frames=frames,
            causes=(opened.cause,) if opened.cause is not None else (),
            thread=opened.thread,
            rank=opened.rank,
            time=opened.time,
            context=opened.context[:300],
            whole=opened.header and not opened.cut,
            handled=opened.logged or handled(opened.context, opened.level),
            compile_id=opened.compile_id or line.compile_id,
        )
        if opened.cut:
            event.details["cut"] = True
        if opened.inner and self._outer is not None:
            self._outer.causes = (*self._outer.causes, event)
            event, self._outer = self._outer, None
        self._closed = _Closed(event)
        if not self._open:
            self._no_source.clear()
        return out

    def _continues(self, line: Line, body: str) -> bool:
        """Whether the line goes on with the message of the exception before it."""
        closed = self._closed
        assert closed is not None
        closed.lines += 1
        if closed.lines > MESSAGE_LINES or line.level is not None or line.time is not None:
            return False
        if not body.strip():
            closed.blank = True
            return True
        if not closed.event.message.strip():  # torch's way of showing two tracebacks in one
            closed.event.message, closed.blank = body[:MESSAGE_CHARACTERS], False
            return True
        announced = closed.event.message.partition("\n")[0].endswith(":")  # "... raised:"
        if body.startswith("Exception Group") or (
            not announced and _LAST_LINE.match(body) and _known(body)
        ):
            return False
        if body.startswith(_USER_CODE):
            closed.user_code = True
        if closed.user_code and body.startswith(_LOGGING_ENDS):
            closed.lines = MESSAGE_LINES
            return True
        more = body.startswith(_CONTINUATIONS) or announced or closed.user_code
        if not more or (closed.blank and body.startswith("  ") and not announced):
            # Anything else is the next output of the program.
            return closed.user_code or bool(body.startswith("  "))
        if len(closed.event.message) < MESSAGE_CHARACTERS:
            closed.event.message = f"{closed.event.message}\n{body}"[:MESSAGE_CHARACTERS]
        return True

    def _settle(self) -> list[Event]:
        """The exception whose message has ended."""
        closed, self._closed = self._closed, None
        if self._link is not None and closed is None:
            closed, self._link = _Closed(self._link), None
        return [closed.event] if closed is not None else []

    def _give_up(self, opened: _Open) -> list[Event]:
        """A traceback without its last line; without its header too, the frames stand alone."""
        if opened.cause is not None and not opened.frames:
            return [opened.cause]
        frames = tuple(_made(frame) for frame in opened.frames)
        causes = (opened.cause,) if opened.cause is not None else ()
        common = {
            "thread": opened.thread,
            "rank": opened.rank,
            "time": opened.time,
            "context": opened.context[:300],
            "handled": opened.logged or handled(opened.context, opened.level),
        }
        if opened.header:
            return [Event(Kind.FRAMES, opened.place, frames=frames, causes=causes, **common)]  # type: ignore[arg-type]
        if _looks_like_grep(frames):
            return [
                Event(Kind.FRAMES, place, frames=(frame,), **common)  # type: ignore[arg-type]
                for frame, place in zip(frames, opened.places, strict=True)
            ]
        return [Event(Kind.FRAMES, opened.place, frames=frames, **common)] if frames else []  # type: ignore[arg-type]


def _frame_in(body: str) -> re.Match[str] | None:
    if 'File "' in body:
        return _FRAME.search(body)
    return _NOTEBOOK_FRAME.match(body) or _RICH_FRAME.match(body)


def _looks_like_grep(frames: tuple[Frame, ...]) -> bool:
    """Equal frames without source lines one after the other: what a grep leaves of tracebacks."""
    return len(frames) > 1 and len(set(frames)) < len(frames) and not any(f.source for f in frames)


def _key(frame: list[str | int]) -> _Key:
    return tuple(frame[:3])


def _made(frame: list[str | int]) -> Frame:
    file, line, function, source = frame
    return Frame(str(file), int(line), str(function), str(source))


def _known(body: str) -> bool:
    return body.partition(":")[0].endswith(_KNOWN_ENDS)
