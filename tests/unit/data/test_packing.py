"""Packing: nothing is lost, nothing is seen twice, and the order depends on the data alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import Document, pack_documents
from dflash.objective import sample_anchors

PAD = 999_999


def document(begin, size, mask=None):
    """Tokens begin, begin+1, ...: every token of a test's data is another number."""
    learnt = [True] * size if mask is None else mask
    ids = torch.arange(begin, begin + size, dtype=torch.int32)
    return Document(ids, torch.tensor(learnt, dtype=torch.bool), f"f:{begin}")


@st.composite
def documents(draw):
    """Documents of random lengths and masks, all tokens different."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=40), max_size=25))
    begins = [sum(map(len, masks[:n])) for n in range(len(masks))]
    return [document(b, len(m), m) for b, m in zip(begins, masks, strict=True)]


def pieces_by_definition(documents, row_length, limit):
    """[(token ids, mask)] that must come out."""
    out = []
    for item in documents:
        ids, mask = item.input_ids.tolist()[:limit], item.loss_mask.tolist()[:limit]
        for at in range(0, len(ids), row_length):
            part = mask[at : at + row_length]
            if any(a and b for a, b in pairwise(part)):
                out.append((ids[at : at + row_length], part))
    return out


def pieces_of(rows):
    """[(token ids, mask, row, positions)] read back from the rows' tensors."""
    out = []
    for row in rows:
        for name in row.document_ids.unique().tolist():
            here = row.document_ids == name
            if name >= 0:
                out.append(
                    (row.input_ids[here].tolist(), row.loss_mask[here].tolist(), row.index,
                     row.position_ids[here].tolist())
                )  # fmt: skip
    return out


@settings(max_examples=100, deadline=None)
@given(
    documents(),
    st.integers(2, 24),
    st.none() | st.integers(2, 50),
    st.integers(1, 4),
)
def test_every_token_is_in_one_row_once(items, row_length, limit, open_rows):
    """Documents stay whole unless longer than a row; positions restart; padding is inert."""
    rows, counts = pack_documents(
        items, row_length, padding_token_id=PAD, max_document_tokens=limit, open_rows=open_rows
    )
    got = pieces_of(rows)
    expected = pieces_by_definition(items, row_length, limit)
    assert sorted((ids, mask) for ids, mask, _, _ in got) == sorted(expected)
    assert all(positions == list(range(len(ids))) for ids, _, _, positions in got)
    for number, row in enumerate(rows):
        assert row.index == number
        fields = (row.input_ids, row.loss_mask, row.document_ids, row.position_ids)
        assert {tuple(f.shape) for f in fields} == {(row_length,)}
        assert [f.dtype for f in fields] == [torch.int64, torch.bool, torch.int64, torch.int64]
        names = row.document_ids.tolist()
        used = sum(name >= 0 for name in names)
        assert names == sorted(names[:used]) + [-1] * (row_length - used)
        assert set(names[:used]) == set(range(max(names) + 1)) and used
        assert (row.input_ids[used:] == PAD).all() and not (row.input_ids[:used] == PAD).any()
        assert not row.loss_mask[used:].any() and not row.position_ids[used:].any()
    kept = [ids for ids, _ in expected]
    assert counts.documents == len(items)
    assert counts.pieces == len(kept)
    assert counts.tokens == sum(map(len, kept))
    assert counts.supervised == sum(sum(mask) for _, mask in expected)
    assert counts.rows == len(rows)


@settings(max_examples=60, deadline=None)
@given(documents(), st.integers(2, 24))
def test_every_packed_document_can_hold_an_anchor(items, row_length):
    """What packing keeps and what the objective can use are the same."""
    for row in pack_documents(items, row_length, padding_token_id=0)[0]:
        anchors = sample_anchors(
            row.loss_mask, row.document_ids, row_length, seed=0, epoch=0, sample=row.index
        )
        with_anchor = row.document_ids[anchors.positions[anchors.valid]].unique().tolist()
        assert with_anchor == list(range(int(row.document_ids.max()) + 1))


def lengths(rows):
    """Lengths of each row's documents, in order."""
    return [torch.bincount(r.document_ids[r.document_ids >= 0]).tolist() for r in rows]


def pack_sizes(sizes, **options):
    items = [document(100 * n, size) for n, size in enumerate(sizes)]
    return pack_documents(items, 10, padding_token_id=0, **options)[0]


def test_a_document_goes_where_it_fits_best():
    """4 fits in both open rows (free: 4 and 5) and fills the first."""
    assert lengths(pack_sizes([6, 5, 4, 5])) == [[6, 4], [5, 5]]


def test_one_open_row_is_next_fit():
    """What is closed stays closed: the last 4 would have fitted into the first row."""
    assert lengths(pack_sizes([6, 5, 4], open_rows=1)) == [[6], [5, 4]]
    assert lengths(pack_sizes([6, 7, 4], open_rows=1)) == [[6], [7], [4]]
    assert lengths(pack_sizes([6, 7, 4], open_rows=2)) == [[6, 4], [7]]


def test_the_fullest_row_makes_room_for_a_new_one():
    """Rows of 6, 8 and 7 open, then 7: the row of 8 closes, so the 2 goes to a row of 7."""
    assert lengths(pack_sizes([6, 8, 7, 7, 2], open_rows=3)) == [[6], [8], [7, 2], [7]]


def test_what_is_cut_or_dropped_is_counted():
    """In order: whole, cut in three (the last of 1 token), cut off at 25, unlearnt, too short."""
    some = [False] * 8
    items = [
        document(0, 5),
        document(100, 21),
        document(200, 40),
        document(300, 8, some),
        document(400, 8, [*some[:6], False, True]),
        document(500, 1),
    ]
    rows, counts = pack_documents(items, 10, padding_token_id=0, max_document_tokens=25)
    assert (counts.documents, counts.split, counts.truncated) == (6, 2, 1)
    assert (counts.dropped, counts.dropped_pieces) == (3, 4)
    assert (counts.pieces, counts.tokens, counts.supervised) == (6, 50, 50)
    assert len(rows) == 5 and lengths(rows)[0] == [5, 5]


def test_rows_are_a_sequence():
    """Indices from the end, slices, and an end."""
    rows = pack_sizes([9, 9, 9])
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[-1].index == 2 and [row.index for row in rows[1:]] == [1, 2]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            rows[outside]


def test_a_row_of_nothing_is_refused():
    with pytest.raises(ValueError, match="row_length 0"):
        pack_documents([], 0, padding_token_id=0)
