"""From blocks of bytes to the lines worth parsing.

The head and the tail of a log are parsed whole. Between them, only what lies round a hit of the
literals is, and a sample of every block, from which one can tell who still speaks. Cost is linear
in the bytes and in the hits; a line longer than a line of text can be is cut round its hits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.triage.lines import LINE_CHARACTERS
from harness.triage.needles import BACK, Needles
from harness.triage.reader import Block

HEAD = 2 << 20
TAIL = 1 << 18
SAMPLE = 1 << 10
PIECES_OF_A_LINE = 8
# The windows of the last hits of a block may reach into the next one.
LAST_HITS = 2000


@dataclass(slots=True)
class Raw:
    """One line as bytes.

    Attributes:
        number: from 1; pieces of one long line share it.
        hit: whether one of the literals is in it.
        gap: whether lines before it were left out.
        sample: taken only to see who speaks.
    """

    offset: int
    number: int
    data: bytes
    hit: bool = False
    gap: bool = False
    sample: bool = False


def lines(blocks: Iterable[Block], needles: Needles) -> Iterator[Raw]:
    """The lines to parse, in order."""
    number, carry, gap = 1, 0, False
    for block in blocks:
        data, size = block.data, len(block.data)
        hits = needles.hits(data)
        starts = [start for start, _ in hits]
        done = first = 0
        for low, high in _spans(block, hits, carry):
            gap = gap or low > done
            number += data.count(b"\n", done, low)
            first = bisect_left(starts, low, first)
            at = low
            while at < high:
                end = data.find(b"\n", at, high)
                stop = high if end < 0 else end
                last = first
                while last < len(starts) and starts[last] < stop:
                    last += 1
                for raw in _pieces(data, at, stop, starts[first:last], block.offset, number):
                    raw.gap, gap = gap, False
                    yield raw
                first = last
                number += end >= 0
                at = stop + 1
            done = min(at, size)
        if done < size:
            gap = True
            yield from _sample(data, max(done, size - SAMPLE), block.offset)
        number += data.count(b"\n", done)
        ends = (start + forward for start, forward in hits[-LAST_HITS:])
        carry = max(0, max(ends, default=0) - size, carry - size)


def _spans(block: Block, hits: list[tuple[int, int]], carry: int) -> Iterator[tuple[int, int]]:
    """Ranges of the block to parse: whole lines, in order, apart from each other."""
    size = len(block.data)
    wanted = [(0, max(HEAD - block.offset, carry))] if max(HEAD - block.offset, carry) > 0 else []
    wanted += [(start - BACK, start + forward) for start, forward in hits]
    if block.last:
        wanted.append((size - TAIL, size))
    floor = low = high = 0
    for begin, end in wanted:
        if begin > high + LINE_CHARACTERS:
            if high > low:
                low, high = _to_lines(block.data, low, high, floor)
                floor = high
                yield low, high
            low, high = max(begin, floor), max(end, floor)
        high = max(high, end)
        if high >= size:
            high = size
            break
    if high > low:
        yield _to_lines(block.data, low, high, floor)


def _to_lines(data: bytes, low: int, high: int, floor: int) -> tuple[int, int]:
    """The range cut to whole lines; within a line longer than a range it stays as it is."""
    low = max(low, floor)
    if low > floor:
        start = data.rfind(b"\n", max(floor, low - LINE_CHARACTERS), low)
        low = start + 1 if start >= 0 else low
    end = data.find(b"\n", high, high + LINE_CHARACTERS)
    return low, end + 1 if end >= 0 else min(len(data), high)


def _pieces(
    data: bytes, at: int, stop: int, hits: list[int], offset: int, number: int
) -> Iterator[Raw]:
    """A line as one piece, or as several: at carriage returns, and round the hits of a long one."""
    if stop - at <= LINE_CHARACTERS:
        text = data[at:stop]
        if b"\r" not in text:
            yield Raw(offset + at, number, text, bool(hits))
            return
        for part in text.split(b"\r"):
            end = at + len(part)
            if part:
                yield Raw(offset + at, number, part, any(at <= hit < end for hit in hits))
            at = end + 1
        return
    done, pieces = at, 0
    for hit in hits or [at]:
        if hit < done and pieces:
            continue
        begin = max(done, hit - LINE_CHARACTERS // 2)
        begin = max(begin, data.rfind(b"\r", begin, hit) + 1)
        end = data.find(b"\r", hit, min(stop, begin + LINE_CHARACTERS))
        done = end if end >= 0 else min(stop, begin + LINE_CHARACTERS)
        yield Raw(offset + begin, number, data[begin:done], bool(hits))
        pieces += 1
        if pieces == PIECES_OF_A_LINE:
            return


def _sample(data: bytes, at: int, offset: int) -> Iterator[Raw]:
    at = data.find(b"\n", at) + 1
    if at == 0:
        return
    for text in data[at:].split(b"\n"):
        if text:
            last = text.rpartition(b"\r")[2][:LINE_CHARACTERS]
            yield Raw(offset + at, 0, last, sample=True, gap=True)
        at += len(text) + 1
