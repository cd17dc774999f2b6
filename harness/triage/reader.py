"""Bytes of a log, whatever it comes from, in blocks of whole lines.

Covered: plain files, ``-`` (standard input), gzip and zstandard (the latter with the package
`zstandard`), known by their first bytes, UTF-16 with its mark, and following a file that grows, is
cut, or is replaced by another one of its name. Memory is bounded by the block, also for a line
without end. A plain file is read, not mapped: a mapped file that is cut while it is read (log
rotation) ends the process with SIGBUS, and the pages of a map count as memory of the reader.

Not covered: archives with several members, remote addresses, UTF-16 without its mark, and what was
written into a followed file between the last look at it and its being cut.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What is found in a block takes many times its size where every other word is a hit.
BLOCK = 1 << 20
POLL_SECONDS = 0.2
# A few packed bytes may stand for a thousand times as many.
PACKED_BYTES = 4096

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a zstandard frame for other programs
_ELSEWHERE = {b"\xfd7zX": "xz -dc", b"BZh9": "bzip2 -dc", b"PK\x03\x04": "unzip -p"}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Unreadable(Exception):
    """A log cannot be read; the message is one line: what, where, what to do."""


class BrokenOff(Unreadable):
    """The rest of a log cannot be read; what came before it was given."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a log.

    Attributes:
        offset: of the first byte in the (unpacked) log.
        data: the bytes; only the log's last line, or one longer than a block, lacks its end.
        last: whether the log ends here.
    """

    offset: int
    data: bytes
    last: bool


def blocks(
    path: str,
    *,
    follow: bool = False,
    idle: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Block]:
    """Reads the log at ``path`` (``-``: standard input).

    Args:
        follow: go on when the end is reached, until interrupted. Offsets and numbers of lines go
            on too where the file is cut or replaced.
        idle: stop following after so many seconds without a new byte.
        stop: asked now and then; True ends the following, and what was read is still given.

    Raises:
        Unreadable: what is wrong with it, in one line.
        BrokenOff: behind the blocks that could be read.
    """
    if path != "-" and Path(path).is_dir():
        raise Unreadable(
            f"{path}: is a folder; name the logs in it, or use --trace for TORCH_TRACE"
        )
    broken: list[Exception] = []
    end = 0

    def until_broken(pieces: Iterable[bytes]) -> Iterator[bytes]:
        try:
            yield from pieces
        except (OSError, EOFError) as error:
            broken.append(error)

    try:
        source = _Source(path)
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror})") from error
    try:
        pieces = _followed(source, idle, stop) if follow else _pieces(source)
        for block in _whole_lines(_as_utf8(until_broken(pieces))):
            end = block.offset + len(block.data)
            yield block
    finally:
        source.close()
    if broken:
        reason = getattr(broken[0], "strerror", None) or str(broken[0])
        raise BrokenOff(f"{path}: cannot be read beyond byte {end} ({reason})") from broken[0]


class _Source:
    """A file, a pipe or standard input: bytes, of which one can look at the first."""

    def __init__(self, path: str) -> None:
        self.path = path
        if path == "-":
            if sys.stdin is None:
                raise Unreadable("-: standard input is closed; name a file, or pipe a log into it")
            self.fd = os.dup(sys.stdin.fileno())
        else:
            self.fd = os.open(path, os.O_RDONLY)
        self._ahead = b""

    def first(self) -> bytes:
        """The first four bytes, or fewer at the end; they stay."""
        while len(self._ahead) < 4 and (more := os.read(self.fd, 4 - len(self._ahead))):
            self._ahead += more
        return self._ahead

    def read(self, size: int) -> bytes:
        """At most so many bytes; b"" at the end."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        return os.read(self.fd, size)

    def renew(self) -> bool:
        """At the end of a file: goes to its beginning if it was cut, to a new one of its name."""
        try:
            there, here = os.stat(self.path), os.fstat(self.fd)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
                fd = os.open(self.path, os.O_RDONLY)
                os.close(self.fd)
                self.fd = fd
                return True
            if here.st_size < os.lseek(self.fd, 0, os.SEEK_CUR):
                os.lseek(self.fd, 0, os.SEEK_SET)
                return True
        except FileNotFoundError:  # between the renaming and the new file
            pass
        return False

    def close(self) -> None:
        os.close(self.fd)


def _pieces(source: _Source) -> Iterator[bytes]:
    first = source.first()
    if first.startswith(_GZIP):
        return _in_blocks(_unpacked(source, lambda: zlib.decompressobj(31), zlib.error))
    if first == _ZSTD or _SKIPPED.match(first):
        try:
            import zstandard
        except ImportError:
            raise Unreadable(
                f"{source.path}: needs the package zstandard: pip install 'dflash-trainer[zst]'"
            ) from None
        new = zstandard.ZstdDecompressor().decompressobj
        return _in_blocks(_unpacked(source, new, zstandard.ZstdError))
    if first in _ELSEWHERE:
        command = f"{_ELSEWHERE[first]} LOG | harness triage -"
        raise Unreadable(f"{source.path}: is packed in a form that is not read: {command}")
    return iter(lambda: source.read(BLOCK), b"")


def _unpacked(source: _Source, new: Callable[[], Any], failure: type[Exception]) -> Iterator[bytes]:
    """The bytes of one member after the other. Raises EOFError where it breaks off."""
    member = None
    while data := source.read(PACKED_BYTES):
        while data:
            member = member or new()
            try:
                yield member.decompress(data)
            except failure as error:
                raise EOFError(str(error)) from error
            data = b""
            if member.eof:  # padding may follow
                data, member = member.unused_data.lstrip(b"\0"), None
    if member is not None:
        raise EOFError("it ends before its end mark")


def _in_blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            for at in range(0, len(piece), BLOCK):
                part = piece[at : at + BLOCK]
                if size + len(part) > BLOCK:
                    yield b"".join(parts)
                    parts, size = [], 0
                parts.append(part)
                size += len(part)
    except EOFError:
        yield b"".join(parts)
        raise
    yield b"".join(parts)


def _followed(source: _Source, idle: float | None, stop: Callable[[], bool]) -> Iterator[bytes]:
    """The bytes as they come; b"" for "nothing yet"."""
    never = threading.Event()
    quiet_since = time.monotonic()
    began = False
    last = b"\n"
    while not stop():
        if source.path == "-":
            ready, _, _ = select.select([source.fd], [], [], POLL_SECONDS)
            data = source.read(BLOCK) if ready else b""
            if ready and not data:
                return  # the writer has closed the pipe
        else:
            data = source.read(BLOCK)
            if not data and source.renew():
                if last != b"\n":  # a line of the old file does not go on in the new one
                    yield b"\n"
                last = b"\n"
                continue
            if not data:
                never.wait(POLL_SECONDS)
        now = time.monotonic()
        if data:
            if not began and data.startswith((_GZIP, _ZSTD)):
                raise Unreadable(f"{source.path}: a packed log cannot be followed")
            began, last, quiet_since = True, data[-1:], now
        elif idle is not None and now - quiet_since >= idle:
            return
        yield data


def _as_utf8(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16 (known by its mark) as UTF-8; anything else as it is."""
    decoder = None
    began = False
    for piece in pieces:
        if not began and piece:
            began = True
            if piece.startswith(_UTF_16):
                decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield decoder.decode(piece).encode("utf-8", "replace") if decoder else piece
    if decoder:
        yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[Block]:
    offset, parts, waiting = 0, [], 0  # parts: bytes of a line that has not ended
    held: bytes | None = None
    for data in pieces:
        if not data:  # following: what there is must not wait for more
            if held:
                yield Block(offset, held, False)
                offset, held = offset + len(held), None
            continue
        cut = data.rfind(b"\n") + 1
        if not cut and waiting + len(data) < BLOCK:
            parts.append(data)
            waiting += len(data)
            continue
        cut = cut or data.rfind(b"\r") + 1 or len(data)  # progress bars write no other line end
        block = b"".join([*parts, data[:cut]]) if parts else data[:cut]
        rest = data[cut:]
        parts, waiting = ([rest], len(rest)) if rest else ([], 0)
        if held:
            yield Block(offset, held, False)
            offset += len(held)
        held = block
    tail = b"".join(parts)
    if held and tail:
        yield Block(offset, held, False)
        offset, held = offset + len(held), None
    yield Block(offset, held or tail, True)
