"""Bytes of a log, whatever it comes from, in blocks of whole lines.

Covered: plain files, ``-`` (standard input), ``.gz``, ``.zst`` (with the package `zstandard`), and
following a file that still grows. Memory is bounded by the block, also for a line without end.
A plain file is read, not mapped: a mapped file that is cut while it is read (log rotation) ends
the process with SIGBUS, and the pages of a map count as memory of the reader.

Not covered: archives with several members, remote addresses, and a followed file's rotation.
"""

from __future__ import annotations

import gzip
import os
import select
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 4 << 20
POLL_SECONDS = 0.2


class Unreadable(Exception):
    """A log cannot be read; the message is one line: what, where, what to do."""


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


def blocks(path: str, *, follow: bool = False, idle: float | None = None) -> Iterator[Block]:
    """Reads the log at ``path`` (``-``: standard input).

    Args:
        follow: go on when the end is reached, until interrupted.
        idle: stop following after so many seconds without a new byte.

    Raises:
        Unreadable: what is wrong with it, in one line.
    """
    try:
        with _opened(path) as stream:
            read = _reader(stream, path, follow=follow, idle=idle)
            yield from _whole_lines(read)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unreadable(f"{path}: cannot be read ({reason})") from error


def _opened(path: str) -> BinaryIO:
    if path == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    if Path(path).is_dir():
        raise Unreadable(
            f"{path}: is a folder; name the logs in it, or use --trace for TORCH_TRACE"
        )
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        return _unpacked_zst(path)
    return open(path, "rb", buffering=0)


def _unpacked_zst(path: str) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise Unreadable(
            f"{path}: needs the package zstandard: pip install 'dflash-trainer[zst]'"
        ) from None
    raw = open(path, "rb")  # noqa: SIM115
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=True)

    class _Stream:  # zstandard's own error is not an OSError
        def read(self, size: int) -> bytes:
            try:
                return reader.read(size)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error

        def __enter__(self) -> _Stream:
            return self

        def __exit__(self, *_: object) -> None:
            reader.close()

    return _Stream()  # type: ignore[return-value]


def _reader(
    stream: BinaryIO, path: str, *, follow: bool, idle: float | None
) -> Callable[[], bytes | None]:
    """A function that gives the next bytes; b"" for "nothing yet", None at the end."""
    if not follow:

        def read() -> bytes | None:
            return stream.read(BLOCK) or None

        return read
    never = threading.Event()
    quiet_since = time.monotonic()

    def read_on() -> bytes | None:
        nonlocal quiet_since
        if path == "-":
            ready, _, _ = select.select([stream], [], [], POLL_SECONDS)
            data = stream.read(BLOCK) if ready else b""
            if ready and not data:
                return None  # the writer has closed the pipe
        else:
            data = stream.read(BLOCK)
            if not data:
                never.wait(POLL_SECONDS)
        now = time.monotonic()
        if data:
            quiet_since = now
        elif idle is not None and now - quiet_since >= idle:
            return None
        return data

    return read_on


def _whole_lines(read: Callable[[], bytes | None]) -> Iterator[Block]:
    offset, parts, waiting = 0, [], 0  # parts: bytes of a line that has not ended
    held: bytes | None = None
    while True:
        data = read()
        if data is None:
            break
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
        cut = cut or len(data)
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
