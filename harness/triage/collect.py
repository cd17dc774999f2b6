"""Lines in, groups of equal events and the list of speakers out. Bounded memory.

Each speaker (rank, thread) has its own parsers, since lines of several mix. An unmarked line goes
on with the stream of the marked line before it when that one has something open.

Not covered: a speaker that never says its name; all such lines are one stream.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from harness.triage.dumps import Dumps
from harness.triage.events import FAILURES, Event, Frame, Kind, Place, shorten, signature
from harness.triage.lines import Line, parse_line
from harness.triage.native import Native, signal_of
from harness.triage.records import expand
from harness.triage.scan import Raw
from harness.triage.tracebacks import HEADER, Tracebacks
from harness.triage.words import free_exception, reported, says_failed

STREAMS = 256  # more ranks and threads than that share one
GROUPS = 2000
LOGGED = 200
NOTICES = 2000
SPEAKERS = 1024
THREADS_OF_A_GROUP = 256
SAME_KILL_BYTES = 2000
SAME_CRASH_BYTES = 64_000  # the interpreter's last words are long
DEATHS = 16  # of which a later line may tell again
HEAD_LINES = 4000  # in which the torch version is looked for


@dataclass(slots=True)
class Group:
    """Equal events.

    Attributes:
        event: the first of them.
        count: how many.
        first, last: where the first and the last one stand.
        first_time, last_time: what the log says of when.
        speakers: who met it (thread, rank), in the order of appearance.
    """

    event: Event
    count: int
    first: Place
    last: Place
    first_time: str | None
    last_time: str | None
    speakers: dict[tuple[str | None, str | None], int] = field(default_factory=dict)

    @property
    def threads(self) -> list[str]:
        """Who met it: names of threads, ``rank3`` where the text names the rank only."""
        return list(dict.fromkeys(who for who, _ in self.speakers if who is not None))

    @property
    def ranks(self) -> list[str]:
        """The ranks that met it."""
        return list(dict.fromkeys(rank for _, rank in self.speakers if rank is not None))

    def met(self, event: Event) -> None:
        """Counts one more occurrence."""
        self.count += 1
        self.last = event.place
        self.last_time = event.time or self.last_time
        who = (event.who, event.rank)
        if who in self.speakers or len(self.speakers) < THREADS_OF_A_GROUP:
            self.speakers[who] = self.speakers.get(who, 0) + 1


@dataclass(slots=True)
class Speaker:
    """Who writes into the log: a rank, a thread, or a thread of a rank.

    Attributes:
        first, last: places of its first and last line seen; between the head and the tail of a
            large log only samples and the surroundings of hits are seen.
        time: of its last line that has one.
        text: its last line.
    """

    name: str
    first: Place
    last: Place
    time: str | None = None
    text: str = ""
    lines: int = 0


@dataclass
class _Stream:
    tracebacks: Tracebacks
    dumps: Dumps
    native: Native
    rank: str | None
    before: Line | None = None


_TORCH_VERSION = re.compile(
    r"(?:\bpytorch|\btorch)(?:\.__version__|[ _-]?version)?[\"']?"
    r"\s{0,3}(?:==|=|:|-|is|\s)\s{0,3}[\"'v]{0,2}"
    r"(2\.\d{1,2}(?:\.\d{1,2})?)(?:[a-z.]*\.?dev(\d{8}))?(?:[+\w.]*)",
    re.I,
)
# "After PyTorch 2.9 this warns", "uninstalled torch-2.8.0": not the torch that runs.
_OTHER_TORCH = re.compile(
    r"\b(?:after|before|since|until|till|in|from|than|requires?|needs?|uninstall(?:ed|ing)"
    r"|existing installation:)\W{1,3}$",
    re.I,
)
_DIGITS = re.compile(r"\d+")
_TORCH_SOURCES = ("torch/", "site-packages/torch/", "dist-packages/torch/")
_RANK_IN_NAME = re.compile(r"(?:rank[_-]?(\d{1,5})|/(\d{1,5})/(?:stdout|stderr)\.log)")


# The marks that chat templates put round a turn.
_TURN_BEGINS = re.compile(r"<\|(?:im_start|start_header_id|user|assistant|system|begin_of_text)\|>")
_TURN_ENDS = re.compile(r"<\|(?:im_end|eot_id|eom_id|end|endoftext|end_of_text)\|>")


class Collector:
    """Takes the lines of one log or of several, one after the other."""

    def __init__(self, on_new: Callable[[Group], None] | None = None) -> None:
        self.groups: dict[object, Group | None] = {}
        self.notices: dict[str, Group] = {}
        self.speakers: dict[str, Speaker] = {}
        self.stated_torch: dict[str, None] = {}
        self.logged: dict[Frame, None] = {}
        self.went_on: dict[str, int] = {}  # input -> offset of its last ordinary line
        self.overflow = 0
        self.lines = 0
        self._met = 0
        self.last_time: str | None = None
        self._on_new = on_new
        self._start("-")

    def _start(self, name: str) -> None:
        self._name = name
        self._begin = self.lines
        self._streams: dict[str, _Stream] = {}
        self._last_marked = "/"
        self._deaths: deque[Event] = deque(maxlen=DEATHS)
        self._before: Line | None = None
        # Where a turn of a conversation begins, and how many events were met before it.
        self._chat: tuple[int, int] | None = None
        found = _RANK_IN_NAME.search(name)
        self._rank = next((g for g in found.groups() if g), None) if found else None
        self._plain = f"{self._rank or ''}/"  # the key of a line that names nobody

    def take(self, name: str, raws: Iterable[Raw]) -> None:
        """Reads one log to its end."""
        self._start(name)
        for raw in raws:
            self.add(raw)
        self.finish()

    def add(self, raw: Raw) -> None:
        """Reads one line."""
        if not raw.data and not raw.gap and not self._reading():
            self.lines += 1
            return
        line = parse_line(raw.data, raw.offset, raw.number or None)
        if line.rank is None:
            line.rank = self._rank
        if raw.sample:
            self._heard(line, raw)
            return
        self.lines += 1
        for one in expand(line):
            self._read(one, raw)

    def _read(self, line: Line, raw: Raw) -> None:
        if raw.gap:
            for stream in self._streams.values():
                stream.tracebacks.gap()
        if self.lines - self._begin < HEAD_LINES and "orch" in line.whole:
            self._state_torch(line.whole)
        stream = self._stream(line)
        if line.source is not None and line.source.startswith(_TORCH_SOURCES):
            self._logged(line.source)
        taken = self._dispatch(stream, line, raw)
        self._pass_over_chat(stream, line)
        self._heard(line, raw)
        if line.text.strip() and not taken:
            stream.before = self._before = line
            self.went_on[self._name] = line.offset

    def _pass_over_chat(self, stream: _Stream, line: Line) -> None:
        """Forgets what stands inside a turn of a conversation: a sample of data that was printed.

        A turn counts when both its ends are there and the program said nothing in between.
        """
        if line.time is not None or line.level is not None:
            self._chat = None
        if "<|" not in line.text:
            return
        begin = max((m.start() for m in _TURN_BEGINS.finditer(line.text)), default=-1)
        end = max((m.start() for m in _TURN_ENDS.finditer(line.text)), default=-1)
        if self._chat is not None and end >= 0:
            offset, met = self._chat
            self._keep_all(e for e in stream.tracebacks.finish() if e.place.offset < offset)
            if self._met > met:
                inside = [k for k, g in self.groups.items() if _since(g, self._name, offset)]
                for key in inside:
                    del self.groups[key]
                said = [k for k, g in self.notices.items() if _since(g, self._name, offset)]
                for text in said:
                    del self.notices[text]
        self._chat = (line.offset, self._met) if begin > end else None

    def _reading(self) -> bool:
        """Whether a blank line could end, or belong to, something."""
        return any(
            stream.tracebacks.reading or stream.dumps.busy
            for stream in (self._streams.get(self._last_marked), self._streams.get(self._plain))
            if stream is not None
        )

    def finish(self) -> None:
        """The end of a log: whatever is open is closed."""
        for stream in self._streams.values():
            for part in (stream.tracebacks, stream.dumps, stream.native):
                for event in part.finish():
                    self._keep(event)
        self._streams.clear()

    # --- the parts -------------------------------------------------------------------------------

    def _stream(self, line: Line) -> _Stream:
        key = line.key
        marked = key != self._plain or line.time is not None
        if not marked:
            last = self._streams.get(self._last_marked)
            opened = last is not None and (last.tracebacks.busy or last.dumps.busy)
            if opened:
                key = self._last_marked
        else:
            self._last_marked = key
        if key not in self._streams:
            if len(self._streams) >= STREAMS:
                key = "/"
            if key not in self._streams:
                self._streams[key] = _Stream(
                    Tracebacks(self._name), Dumps(self._name), Native(self._name), line.rank
                )
        return self._streams[key]

    def _dispatch(self, stream: _Stream, line: Line, raw: Raw) -> bool:
        taken, events = stream.dumps.feed(line)
        self._keep_all(events)
        if taken:
            return True
        context = stream.before
        if line.key == self._plain or context is None:
            context = self._before
        taken, events = stream.tracebacks.feed(line, context)
        self._keep_all(events)
        if taken:
            if HEADER in line.text:  # the line before is about this traceback, not the next
                stream.before = self._before = None
            return True
        taken, events = stream.native.feed(line, raw.hit)
        if any(event.kind is Kind.KILLED for event in events):
            self._end_last_words(line.rank)
        self._keep_all(events)
        failed = says_failed(line)
        if taken or not (raw.hit or failed):
            return taken
        free = list(free_exception(line, self._name))
        self._keep_all(free)
        if not free:
            event = Event(
                Kind.ERROR if failed else Kind.NOTICE, line.place(self._name),
                type=line.level or ("ERROR" if failed else ""),
                message=line.text if failed else reported(line.text),
                rank=line.rank, thread=line.thread, time=line.time, compile_id=line.compile_id,
            )  # fmt: skip
            if failed:
                self._keep(event)
            self._note(event)
        return False

    def _end_last_words(self, rank: str | None) -> None:
        """Closes the dump or native crash of a process that is told to be dead."""
        for stream in self._streams.values():
            if rank is None or stream.rank is None or stream.rank == rank:
                self._keep_all((*stream.dumps.finish(), *stream.native.end_crash()))

    def _keep_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._keep(event)

    def _keep(self, event: Event) -> None:
        if event.kind is Kind.NOTICE:
            self._note(event)
            return
        self._met += 1
        if event.kind in (Kind.KILLED, Kind.FATAL, Kind.NATIVE) and self._told_already(event):
            return
        group = self.groups.setdefault(signature(event), None) or self._new_group(event)
        if group is None:
            self.overflow += 1
            return
        group.event.handled = group.event.handled and event.handled
        group.met(event)

    def _new_group(self, event: Event) -> Group | None:
        key = signature(event)
        if len(self.groups) > GROUPS:
            del self.groups[key]
            return None
        group = Group(event, 0, event.place, event.place, event.time, event.time)
        self.groups[key] = group
        if self._on_new is not None and event.kind in FAILURES:
            self._on_new(group)
        return group

    def _told_already(self, event: Event) -> bool:
        """Whether a kill is the one that the process itself, a launcher or a shell told before."""
        told = event.kind is Kind.KILLED and any(_same_death(one, event) for one in self._deaths)
        self._deaths.append(event)
        return told

    def _note(self, event: Event) -> None:
        self._met += 1
        key = _DIGITS.sub("#", event.message[:300])
        group = self.notices.get(key)
        if group is None:
            if len(self.notices) >= NOTICES:
                return
            group = Group(event, 0, event.place, event.place, event.time, event.time)
            self.notices[key] = group
        group.met(event)

    def _heard(self, line: Line, raw: Raw) -> None:
        if line.time is not None:
            self.last_time = line.time
        if line.rank is None and line.thread is None:
            return
        parts = [f"rank {line.rank}" if line.rank.isdigit() else line.rank] if line.rank else []
        name = " ".join([*parts, *([line.thread] if line.thread else [])])
        speaker = self.speakers.get(name)
        place = line.place(self._name)
        if speaker is None:
            if not line.text:  # "[0]:" alone is a heading, of torchrun's summary
                return
            if len(self.speakers) >= SPEAKERS:
                return
            speaker = self.speakers[name] = Speaker(name, place, place)
        speaker.last, speaker.text = place, line.text[:200]
        speaker.time = line.time or speaker.time
        speaker.lines += 1

    def _logged(self, source: str) -> None:
        """A place in torch's sources that a logging prefix names: it tells the version too."""
        path, _, number = source.rpartition(":")
        frame = Frame(shorten("/" + path), int(number), "")
        if len(self.logged) < LOGGED:
            self.logged[frame] = None

    def _state_torch(self, text: str) -> None:
        found = _TORCH_VERSION.search(text)
        if found and not _OTHER_TORCH.search(text, 0, found.start()):
            version = found[1] + (f".dev{found[2]}" if found[2] else "")
            self.stated_torch.pop(version, None)  # the order is that of the last statements
            self.stated_torch[version] = None


def _since(group: Group | None, name: str, offset: int) -> bool:
    """Whether a group begins in the log ``name`` at ``offset`` or later."""
    return group is not None and group.first.name == name and group.first.offset >= offset


def _same_death(before: Event, kill: Event) -> bool:
    """Whether a kill is the death that an earlier event told: signal, rank and place agree."""
    limit = SAME_KILL_BYTES if before.kind is Kind.KILLED else SAME_CRASH_BYTES
    return (
        signal_of(before) == kill.type
        and 0 <= kill.place.offset - before.place.offset < limit
        and (before.rank is None or kill.rank is None or before.rank == kill.rank)
        and before.place.name == kill.place.name
    )
