"""Rows in training order: packet numbers to rows, and the way from files to a row set.

Covers the order (a permutation per epoch, so that a run resumes at any packet) and the report of
what the data were. Not covered: which drafter takes which packet; that is the schedule's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash.config import DataSettings
from dflash.data.errors import DataError
from dflash.data.packing import PackCounts, Row, pack_documents
from dflash.data.render import Document, render_sample
from dflash.data.sources import BadLine, read_samples
from dflash.seeds import stable_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowSet:
    """Rows without end: packet n is a row of epoch n // len.

    Nothing is remembered between packets, so any thread may ask for any packet in any order.
    Raises DataError if there are no rows.
    """

    def __init__(self, rows: Sequence[Row], seed: int, shuffle: bool = True) -> None:
        if not rows:
            raise DataError("data: no rows; name files with usable documents in data.train")
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        # Two epochs: at their border some threads are in the one and some in the other.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def packets_per_epoch(self) -> int:
        """How many packets use every row once."""
        return len(self.rows)

    def packet(self, number: int) -> tuple[int, Row]:
        """(epoch, row) of packet `number`, counted from 0. Raises IndexError if it is negative."""
        if number < 0:
            raise IndexError(f"packet {number}: packets are counted from 0")
        epoch, place = divmod(number, len(self.rows))
        return epoch, self.rows[self._order(epoch)[place] if self.shuffle else place]

    def _make_order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(stable_seed("row order", self.seed, epoch))
        order: list[int] = torch.randperm(len(self.rows), generator=generator).tolist()
        return order


@dataclass
class DataReport:
    """What was read and what became of it. `str` of it is a few lines for people."""

    paths: tuple[str, ...]
    row_length: int
    bad_lines: int = 0
    first_bad: list[BadLine] = field(default_factory=list)
    packed: PackCounts = field(default_factory=PackCounts)

    @property
    def fill(self) -> float:
        """Share of the rows' positions that hold a token, 0 to 1."""
        return self.packed.tokens / max(1, self.packed.rows * self.row_length)

    def lines(self) -> list[str]:
        """One fact a line; what did not happen is not mentioned."""
        n = self.packed
        share = n.supervised / max(1, n.tokens)
        said = [
            f"{', '.join(self.paths)}: {n.documents} documents, {n.tokens} tokens, "
            f"{n.supervised} supervised ({share:.1%})",
            f"{n.rows} rows of {self.row_length} tokens, {self.fill:.1%} filled, "
            f"{n.pieces / max(1, n.rows):.1f} documents a row",
        ]
        if n.truncated:
            said.append(f"documents cut off at data.max_document_tokens: {n.truncated}")
        if n.split:
            said.append(f"documents longer than a row, cut into pieces: {n.split}")
        if n.dropped_pieces:
            said.append(
                "dropped, having no two supervised tokens side by side: "
                f"{n.dropped} documents ({n.dropped_pieces} pieces in all)"
            )
        said += bad_line_report(self.bad_lines, self.first_bad)
        return said

    def __str__(self) -> str:
        return "\n".join(self.lines())


def bad_line_report(count: int, first: Sequence[BadLine]) -> list[str]:
    """How many lines were skipped, and the first of them; nothing where there were none."""
    if not count:
        return []
    said = [f"bad lines skipped: {count}", *(f"  {bad}" for bad in first)]
    return [*said, f"  and {count - len(first)} more"] if count > len(first) else said


def refuse_bad_line(bad: BadLine, settings: DataSettings) -> None:
    """Raises DataError where the recipe says that a bad line is fatal."""
    if settings.on_bad_line == "fail":
        raise DataError(f"{bad}; correct it or set data.on_bad_line=skip")


def build_rows(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    paths: Sequence[str | Path] | None = None,
    shuffle: bool | None = None,
    bad_lines_shown: int = 10,
) -> tuple[RowSet, DataReport]:
    """Read, tokenise and pack `paths` (default: settings.train) into rows, with a report.

    shuffle: default settings.shuffle; held-out rows are read in order (False).
    bad_lines_shown: how many bad lines the report names; all are counted.
    Raises DataError: a path cannot be read, a line is bad and settings.on_bad_line is "fail", the
    tokenizer does not fit the data, or no usable document is left.
    """
    paths = settings.train if paths is None else paths
    report = DataReport(tuple(str(path) for path in paths), settings.row_length)

    def documents() -> Iterator[Document]:
        for sample in read_samples(paths, settings.format):
            item: Document | BadLine = (
                sample
                if isinstance(sample, BadLine)
                else render_sample(sample, tokenizer, settings.supervise)
            )
            if isinstance(item, Document):
                yield item
                continue
            refuse_bad_line(item, settings)
            report.bad_lines += 1
            if len(report.first_bad) < bad_lines_shown:
                report.first_bad.append(item)

    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # padding is never seen or learnt
    rows, report.packed = pack_documents(
        documents(),
        settings.row_length,
        padding_token_id=next(token for token in ids if token is not None),
        max_document_tokens=settings.max_document_tokens,
    )
    if not len(rows):
        raise DataError(_nothing_left(report))
    return RowSet(rows, seed, settings.shuffle if shuffle is None else shuffle), report


def _nothing_left(report: DataReport) -> str:
    where = ", ".join(report.paths) or "no path"
    why = f"no two supervised tokens side by side in any of {report.packed.documents} documents"
    if not report.packed.documents:
        why = "no document at all"
    if report.first_bad:
        why += f"; bad lines: {report.bad_lines}, the first {report.first_bad[0]}"
    return f"{where}: nothing to train on ({why}); check the paths, data.format and data.supervise"
