"""Packing: documents into rows of one fixed length.

Best fit with a few open rows: a document goes into the open row that it leaves fullest, so order
stays nearly that of the data and the result depends on nothing but the data. Documents longer
than a row are cut; each piece is a document of its own. Pieces on which no anchor can stand
(nowhere two supervised tokens side by side) are dropped, since they would only take room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from dflash.data.render import Document


@dataclass(frozen=True, eq=False)
class Row:
    """One packed row of S tokens; whole documents first, padding last.

    index: number of the row in its data, the `sample` of its anchors' draw.
    input_ids: [S] int64; the padding token where document_ids is -1.
    loss_mask: [S] bool; False on padding.
    document_ids: [S] int64; 0, 1, ... in the row, -1 for padding.
    position_ids: [S] int64; from 0 in every document, 0 on padding.
    """

    index: int
    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor


class PackedRows(Sequence[Row]):
    """Rows as lists of documents (5 bytes a token); each Row is made when it is asked for."""

    def __init__(
        self, rows: Sequence[Sequence[Document]], row_length: int, padding_token_id: int
    ) -> None:
        self.documents = rows
        self.row_length = row_length
        self.padding_token_id = padding_token_id

    def __len__(self) -> int:
        return len(self.documents)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        length = self.row_length
        row = Row(
            index=number,
            input_ids=torch.full((length,), self.padding_token_id, dtype=torch.int64),
            loss_mask=torch.zeros(length, dtype=torch.bool),
            document_ids=torch.full((length,), -1, dtype=torch.int64),
            position_ids=torch.zeros(length, dtype=torch.int64),
        )
        begin = 0
        for name, document in enumerate(self.documents[number]):
            size = len(document.input_ids)
            place = slice(begin, begin + size)
            row.input_ids[place] = document.input_ids
            row.loss_mask[place] = document.loss_mask
            row.document_ids[place] = name
            row.position_ids[place] = torch.arange(size)
            begin += size
        return row


@dataclass
class PackCounts:
    """What packing did, in documents and tokens. Kept tokens + padding = rows * row length."""

    documents: int = 0  # taken in
    pieces: int = 0  # kept, each a document of a row
    dropped: int = 0  # documents of which nothing was kept
    dropped_pieces: int = 0  # pieces without an anchor, of dropped documents or of kept ones
    split: int = 0  # documents longer than a row
    truncated: int = 0  # documents longer than max_document_tokens
    tokens: int = 0  # kept
    supervised: int = 0  # kept and supervised
    rows: int = 0


def pack_documents(
    documents: Iterable[Document],
    row_length: int,
    *,
    padding_token_id: int,
    max_document_tokens: int | None = None,
    open_rows: int = 16,
) -> tuple[PackedRows, PackCounts]:
    """Rows of `row_length` tokens, in the order in which each got its first document.

    max_document_tokens: longer documents lose their end before they are cut into pieces.
    open_rows: rows that may still take a document; the fullest is closed when a new one is
    needed. 1 is next-fit. Raises ValueError for a row length or number below 1.
    """
    if row_length < 1 or open_rows < 1:
        raise ValueError(f"pack: row_length {row_length} and open_rows {open_rows} must be >= 1")
    counts = PackCounts()
    rows: list[list[Document]] = []
    room: dict[int, int] = {}  # open row -> free tokens, oldest first
    for document in documents:
        for piece in _pieces(document, row_length, max_document_tokens, counts):
            size = len(piece.input_ids)
            fits = [number for number, free in room.items() if free >= size]
            if fits:
                number = min(fits, key=room.__getitem__)
            else:
                if len(room) == open_rows:
                    del room[min(room, key=room.__getitem__)]
                number = len(rows)
                rows.append([])
                room[number] = row_length
            rows[number].append(piece)
            room[number] -= size
            if room[number] < 2:  # no document is shorter than two tokens
                del room[number]
    counts.rows = len(rows)
    return PackedRows(rows, row_length, padding_token_id), counts


def _pieces(
    document: Document, row_length: int, limit: int | None, counts: PackCounts
) -> list[Document]:
    ids, mask = document.input_ids, document.loss_mask
    counts.documents += 1
    if limit is not None and len(ids) > limit:
        counts.truncated += 1
        ids, mask = ids[:limit], mask[:limit]
    counts.split += len(ids) > row_length
    pieces = [
        Document(ids[at : at + row_length], mask[at : at + row_length], document.where)
        for at in range(0, len(ids), row_length)
    ]
    kept = [p for p in pieces if bool((p.loss_mask[:-1] & p.loss_mask[1:]).any())]
    counts.dropped += not kept
    counts.dropped_pieces += len(pieces) - len(kept)
    counts.pieces += len(kept)
    counts.tokens += sum(len(p.input_ids) for p in kept)
    counts.supervised += sum(int(p.loss_mask.sum()) for p in kept)
    return kept
