"""Anchors, block layout and labels: where blocks may start and what their slots hold."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.objective import Anchors, block_labels, block_token_ids, positions, sample_anchors

NAME = {"seed": 1, "epoch": 0, "sample": 0}


@st.composite
def packed_rows(draw):
    """(loss_mask [S], document_ids [S]): documents of random lengths, then padding."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    padding = draw(st.integers(0, 3))
    documents = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    mask = draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    return torch.tensor(mask), torch.tensor(documents)


def candidates_by_definition(mask, documents):
    """The anchor rule, one position at a time."""
    return [
        p
        for p in range(len(mask) - 1)
        if mask[p] and mask[p + 1] and documents[p] == documents[p + 1] and documents[p] >= 0
    ]


def taken(anchors):
    """The valid positions as a list."""
    return anchors.positions[anchors.valid].tolist()


@settings(max_examples=80, deadline=None)
@given(packed_rows(), st.integers(1, 12), st.integers(0, 2**40))
def test_anchors_follow_the_rule_over_random_rows(row, slots, seed):
    """Only candidates, none twice, as many as fit, sorted, unused slots 0 and at the end."""
    mask, documents = row
    allowed = candidates_by_definition(mask.tolist(), documents.tolist())
    anchors = sample_anchors(mask, documents, slots, seed=seed, epoch=0, sample=0)
    chosen = taken(anchors)
    assert set(chosen) <= set(allowed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(slots, len(allowed))
    assert anchors.slots == slots
    assert anchors.valid.tolist() == [True] * len(chosen) + [False] * (slots - len(chosen))
    assert (anchors.positions[~anchors.valid] == 0).all()


def test_ends_of_documents_and_rows_are_not_anchors():
    """The last token of a document has no label after it, though the row goes on."""
    mask = torch.ones(8, dtype=torch.bool)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, -1, -1])
    assert taken(sample_anchors(mask, documents, 20, **NAME)) == [0, 1, 3, 4]


def test_the_first_answer_token_is_an_anchor_and_the_last_prompt_token_is_not():
    """Serving starts at the first generated token, with the whole prompt as its context."""
    mask = torch.tensor([False, False, True, True, True])
    assert taken(sample_anchors(mask, torch.zeros(5, dtype=torch.int64), 9, **NAME)) == [2, 3]


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_row_without_candidates_has_no_valid_anchor(length):
    """Shapes stay the same; the trainer sees that nothing counts."""
    mask = torch.zeros(length, dtype=torch.bool)
    anchors = sample_anchors(mask, torch.zeros(length, dtype=torch.int64), 3, **NAME)
    assert anchors.positions.tolist() == [0, 0, 0]
    assert not anchors.valid.any()


def draw(**change):
    """Anchors of a row with 199 candidates, 20 slots."""
    return taken(
        sample_anchors(
            torch.ones(200, dtype=torch.bool),
            torch.zeros(200, dtype=torch.int64),
            20,
            **NAME | change,
        )
    )


def test_a_draw_depends_on_its_name_and_not_on_the_global_generator():
    """seed, epoch and sample all matter; the number 7 and the key "7" are different rows."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = draw()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert draw() == first
    others = [draw(seed=2), draw(epoch=1), draw(sample=1), draw(sample=7), draw(sample="7")]
    assert len({tuple(x) for x in [first, *others]}) == 6
    # Neighbouring names are not shifted copies of one another.
    assert draw(seed=12, epoch=3) != draw(seed=1, epoch=23)


def test_a_draw_is_the_same_in_another_process():
    """Resume is exact only if the name's hash does not change with PYTHONHASHSEED."""
    code = (
        "import torch; from dflash.objective import sample_anchors; "
        "print(sample_anchors(torch.ones(200, dtype=torch.bool), "
        "torch.zeros(200, dtype=torch.int64), 20, seed=1, epoch=0, sample='a').positions.tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert out.stdout.strip() == str(draw(sample="a"))


def test_all_candidates_are_equally_likely():
    """Each of 10 candidates is in 3 of 10 draws: 1000 draws, 300 expected, sd 14.5."""
    mask, documents = torch.ones(11, dtype=torch.bool), torch.zeros(11, dtype=torch.int64)
    seen = torch.zeros(11)
    for sample in range(1000):
        seen[taken(sample_anchors(mask, documents, 3, seed=0, epoch=0, sample=sample))] += 1
    assert seen[:10].min() > 240
    assert seen[:10].max() < 360


@pytest.mark.parametrize(
    ("mask", "documents", "slots", "said"),
    [
        (torch.ones(3, dtype=torch.bool), torch.zeros(4), 2, r"\(3,\) and \(4,\)"),
        (torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3), 2, r"\[S\]"),
        (torch.ones(3), torch.zeros(3), 2, "loss_mask must be bool"),
        (torch.ones(3, dtype=torch.bool), torch.zeros(3), 0, "slots must be at least 1"),
    ],
)
def test_unfit_rows_are_refused(mask, documents, slots, said):
    """One line: what, where."""
    with pytest.raises(ValueError, match=said):
        sample_anchors(mask, documents, slots, **NAME)


def test_anchors_refuse_wrong_types():
    """int32 positions would index, but compile a second time."""
    with pytest.raises(ValueError, match="int64"):
        Anchors(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\[N\]"):
        Anchors(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.bool))


def test_a_block_is_its_anchor_token_then_masks():
    """Invalid blocks show no token of the row at all."""
    ids = torch.tensor([10, 11, 12, 13])
    anchors = Anchors(torch.tensor([1, 3, 0]), torch.tensor([True, True, False]))
    assert block_token_ids(ids, anchors, 3, 99).tolist() == [11, 99, 99, 13, 99, 99, 99, 99, 99]


def test_slot_positions_count_from_the_anchor_within_its_document():
    """Context keys keep the packed positions; slot k of a block is at position(anchor) + k."""
    where = torch.tensor([0, 1, 2, 0, 1])
    anchors = Anchors(torch.tensor([1, 4]), torch.tensor([True, True]))
    got = positions(where, anchors, 3)
    assert got.tolist() == [0, 1, 2, 0, 1, 1, 2, 3, 1, 2, 3]
    assert got.dtype == torch.int64


@settings(max_examples=80, deadline=None)
@given(packed_rows(), st.integers(1, 6), st.integers(2, 6), st.data())
def test_labels_follow_the_rule_over_random_rows(row, slots, block_size, data):
    """Slot k is the token at a+k, unshifted; slot 0, foreign, unsupervised tokens never count."""
    mask, documents = row
    length = len(mask)
    ids = torch.arange(100, 100 + length)
    at = data.draw(st.lists(st.integers(0, length - 1), min_size=slots, max_size=slots))
    valid = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    anchors = Anchors(torch.tensor(at), torch.tensor(valid))
    labels, counts = block_labels(ids, mask, documents, anchors, block_size)
    assert labels.shape == counts.shape == (slots, block_size)
    for n, a in enumerate(at):
        for k in range(block_size):
            p = a + k
            expected = (
                valid[n]
                and k >= 1
                and p < length
                and bool(mask[p])
                and documents[p] == documents[a]
                and documents[a] >= 0
            )
            assert bool(counts[n, k]) == expected, (n, k)
            assert labels[n, k] == (100 + p if expected else 0)


def test_padding_has_no_labels_even_if_marked_supervised():
    """A wrong loss mask over padding must not train on pad tokens."""
    anchors = Anchors(torch.tensor([0, 1]), torch.tensor([True, True]))
    documents, mask = torch.full((4,), -1), torch.ones(4, dtype=torch.bool)
    _, counts = block_labels(torch.arange(4), mask, documents, anchors, 3)
    assert not counts.any()


def test_every_sampled_anchor_has_a_label_in_slot_one():
    """Why the rule asks for p and p+1: no block is computed for nothing."""
    mask = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.6
    documents = torch.arange(60) // 17
    anchors = sample_anchors(mask, documents, 64, **NAME)
    _, counts = block_labels(torch.arange(60), mask, documents, anchors, 4)
    assert anchors.valid.any()
    assert torch.equal(counts[:, 1], anchors.valid)


def row_of(*lengths):
    """A row of fully supervised documents: (loss_mask [S], document_ids [S])."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.ones(len(documents), dtype=torch.bool), documents


def per_document(anchors, documents):
    """How many valid anchors each document got."""
    return torch.bincount(
        documents[anchors.positions[anchors.valid]], minlength=int(documents.max()) + 1
    ).tolist()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 80), st.integers(0, 99))
def test_every_document_gets_its_share(lengths, slots, seed):
    """At least one slot each where there are enough; beyond that, proportional to within one."""
    mask, documents = row_of(*lengths)
    got = per_document(
        sample_anchors(mask, documents, slots, seed=seed, epoch=0, sample=0), documents
    )
    counts = [n - 1 for n in lengths]  # the last token of a document is no candidate
    able = sum(c > 0 for c in counts)
    assert sum(got) == min(slots, sum(counts))
    if slots >= able:
        assert all((g > 0) == (c > 0) for g, c in zip(got, counts, strict=True))
    else:
        assert set(got) <= {0, 1}
    if able <= slots < sum(counts):
        for g, c in zip(got, counts, strict=True):
            fair = 1 + (c - 1) * (slots - able) / (sum(counts) - able) if c else 0
            assert abs(g - fair) < 1


def test_a_short_document_beside_a_long_one_is_not_forgotten():
    """Drawn over the row, 3 of 1000 candidates would get no slot in 24 of 25 rows."""
    mask, documents = row_of(4, 1000)
    for sample in range(50):
        anchors = sample_anchors(mask, documents, 13, seed=0, epoch=0, sample=sample)
        assert per_document(anchors, documents) == [1, 12]


def test_neighbours_change_how_many_anchors_a_document_has_but_not_their_order():
    """The same document beside a longer one keeps a part of what it drew before."""
    alone = set(taken(sample_anchors(*row_of(60), 20, **NAME)))
    beside = taken(sample_anchors(*row_of(60, 90), 20, **NAME))
    mine = {p for p in beside if p < 60}
    assert 1 <= len(mine) < 20
    assert mine < alone


def test_documents_of_a_row_draw_independently():
    """Two documents of one length do not get the same positions, nor does one in two epochs."""
    drawn = taken(sample_anchors(*row_of(80, 80), 40, **NAME))
    first, second = {p for p in drawn if p < 80}, {p - 80 for p in drawn if p >= 80}
    assert len(first) == len(second) == 20
    assert first != second


def test_with_more_documents_than_slots_each_document_has_its_turn():
    """Which documents are left out is drawn anew, so that none is left out for ever."""
    mask, documents = row_of(*[5] * 8)
    seen = torch.zeros(8)
    for epoch in range(200):
        anchors = sample_anchors(mask, documents, 2, seed=0, epoch=epoch, sample=0)
        seen += torch.tensor(per_document(anchors, documents))
    assert seen.sum() == 400
    assert seen.min() > 25  # 50 expected, sd 6
