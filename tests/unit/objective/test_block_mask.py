"""The block mask: the dense reference against its definition, the BlockMask against the dense."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash.objective import Anchors, dense_mask, flex_block_mask


@st.composite
def masked_rows(draw, max_length=9):
    """(anchors, document_ids, block_size) with close, equal, invalid and padding anchors."""
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=4))
    padding = draw(st.integers(0, 3))
    documents = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    slots = draw(st.integers(1, 6))
    at = draw(st.lists(st.integers(0, len(documents) - 1), min_size=slots, max_size=slots))
    valid = draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    anchors = Anchors(torch.tensor(at), torch.tensor(valid))
    return anchors, torch.tensor(documents), draw(st.integers(2, 5))


@settings(max_examples=100, deadline=None)
@given(masked_rows())
def test_dense_mask_is_the_rule_pair_by_pair(row):
    """Context strictly before the anchor in its document, and one's own block; nothing else."""
    anchors, documents, block_size = row
    got = dense_mask(anchors, documents, block_size)
    length, slots = len(documents), anchors.slots
    assert got.shape == (slots * block_size, length + slots * block_size)
    ids, at, valid = documents.tolist(), anchors.positions.tolist(), anchors.valid.tolist()
    for j in range(slots):
        for k in range(block_size):
            for key in range(length + slots * block_size):
                if key < length:
                    sees = valid[j] and key < at[j] and ids[key] == ids[at[j]] and ids[key] != -1
                else:
                    sees = (key - length) // block_size == j
                assert bool(got[j * block_size + k, key]) == sees, (j, k, key)


@settings(max_examples=100, deadline=None)
@given(masked_rows(max_length=14), st.sampled_from([1, 2, 4, 8, 16, 128]))
def test_flex_mask_equals_the_dense_mask(row, tile):
    """The mask function element by element, and every tile: listed iff touched, full iff filled.

    Neither S nor N*B is a multiple of the tile, except by chance; small tiles lie inside a block.
    """
    anchors, documents, block_size = row
    dense = dense_mask(anchors, documents, block_size)
    mask = flex_block_mask(anchors, documents, block_size, tile)
    assert mask.shape == (1, 1, *dense.shape)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, *dense.shape, device="cpu")[0, 0], dense)

    # torch's own scan of the same function is the reference for every list.
    scanned = create_block_mask(mask.mask_mod, 1, 1, *dense.shape, device="cpu", BLOCK_SIZE=tile)
    for kind in ("", "full_"):
        for side in ("kv", "q"):
            count = getattr(mask, f"{kind}{side}_num_blocks")
            index = getattr(mask, f"{kind}{side}_indices")
            expected_count = getattr(scanned, f"{kind}{side}_num_blocks")
            expected_index = getattr(scanned, f"{kind}{side}_indices")
            assert count.dtype == index.dtype == torch.int32
            assert torch.equal(count, expected_count), (kind, side)
            assert index.shape == expected_index.shape
            used = torch.arange(index.shape[-1]) < count[..., None]
            assert torch.equal(index[used], expected_index[used]), (kind, side)


@settings(max_examples=60, deadline=None)
@given(masked_rows(max_length=14), st.sampled_from([2, 4, 8]))
def test_the_tile_lists_alone_rebuild_the_dense_mask(row, tile):
    """Full tiles without the mask function, partial tiles with it: what a kernel computes."""
    anchors, documents, block_size = row
    dense = dense_mask(anchors, documents, block_size)
    mask = flex_block_mask(anchors, documents, block_size, tile)
    rebuilt = torch.zeros_like(dense)
    q, kv = torch.meshgrid(*(torch.arange(n) for n in dense.shape), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)
    values = mask.mask_mod(zero, zero, q, kv)
    for i in range(mask.kv_num_blocks.shape[-1]):
        rows = slice(i * tile, (i + 1) * tile)
        for t in mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].tolist():
            columns = slice(t * tile, (t + 1) * tile)
            rebuilt[rows, columns] = values[rows, columns]
        for t in mask.full_kv_indices[0, 0, i, : mask.full_kv_num_blocks[0, 0, i]].tolist():
            rebuilt[rows, t * tile : (t + 1) * tile] = True
    assert torch.equal(rebuilt, dense)


def test_full_tiles_exist_and_most_tiles_are_skipped():
    """The point of building tiles: at 128 a long context is mostly full or absent."""
    documents = torch.zeros(1000, dtype=torch.int64)
    anchors = Anchors(torch.arange(0, 1000, 20), torch.ones(50, dtype=torch.bool))
    mask = flex_block_mask(anchors, documents, 16)
    listed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert int(mask.full_kv_num_blocks.sum()) > 15
    assert listed < 0.5 * mask.kv_indices.shape[-1] * mask.kv_indices.shape[-2]
    dense = dense_mask(anchors, documents, 16)
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % 128, 0, -dense.shape[0] % 128))
    touched = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), touched)


def test_no_query_is_blind():
    """An empty softmax is NaN, and NaN spreads: invalid blocks see their own slots."""
    anchors = Anchors(torch.tensor([0, 0]), torch.tensor([True, False]))
    dense = dense_mask(anchors, torch.tensor([0, 0, -1]), 2)
    assert dense.int().tolist() == [
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_mask_functions_share_their_code_and_capture_only_tensors_of_fixed_shape():
    """What dynamo guards on must not change with the anchors."""
    made = []
    for at in ([1, 2, 5], [0, 3, 4]):
        anchors = Anchors(torch.tensor(at), torch.tensor([True, True, at[0] == 1]))
        made.append(flex_block_mask(anchors, torch.tensor([0, 0, 0, 1, 1, 1, 1]), 2))
    first, second = (mask.mask_mod for mask in made)
    assert first.__code__ is second.__code__
    assert first.__defaults__ is second.__defaults__ is None
    for one, other in zip(first.__closure__, second.__closure__, strict=True):
        assert isinstance(one.cell_contents, torch.Tensor)
        assert one.cell_contents.shape == other.cell_contents.shape
        assert one.cell_contents.dtype == other.cell_contents.dtype
    assert made[0].kv_indices.shape == made[1].kv_indices.shape


def test_a_document_in_two_pieces_is_refused():
    """Its context would not be one interval; padding may be anywhere."""
    anchors = Anchors(torch.tensor([1]), torch.tensor([True]))
    with pytest.raises(ValueError, match="document 7 is in 2 pieces") as caught:
        flex_block_mask(anchors, torch.tensor([7, 7, 8, 7]), 2)
    assert "\n" not in str(caught.value)
    flex_block_mask(anchors, torch.tensor([7, 7, -1, 8, -1]), 2)


def test_building_a_mask_leaves_the_tracing_state_of_other_threads_alone(monkeypatch):
    """torch's own builder annotates a dict that all threads share while it sorts tiles."""

    def forbidden(*_):
        raise AssertionError("fx annotation during mask building")

    monkeypatch.setattr(torch.fx.traceback, "annotate", forbidden)
    anchors = Anchors(torch.tensor([1]), torch.tensor([True]))
    flex_block_mask(anchors, torch.tensor([0, 0, 0]), 2)


def test_a_mask_can_be_built_for_another_device():
    """Everything a kernel reads moves, the mask function's tensors included."""
    anchors = Anchors(torch.tensor([1]), torch.tensor([True]))
    mask = flex_block_mask(anchors, torch.tensor([0, 0, 0]), 2, device="meta")
    tensors = [cell.cell_contents for cell in mask.mask_mod.__closure__]
    tensors += [getattr(mask, f"{f}{s}_{w}") for f in ("", "full_") for s in ("q", "kv")
                for w in ("num_blocks", "indices")]  # fmt: skip
    assert {tensor.device.type for tensor in tensors} == {"meta"}
