"""The drafter with its cached context computes what its training forward does."""

import pytest
import torch
from tiny_models import make_drafter, make_target

from dflash.model import ContextCache, sdpa_attend
from dflash.objective import Anchors, dense_mask, positions

S = 60


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pieces", [[1] * 57, [3, 1, 5, 20, 28], [57]])
def test_decoding_equals_the_training_forward_at_every_anchor(dtype, pieces):
    """Context in any pieces, the blocks in between not seen afterwards."""
    drafter = make_drafter(make_target(dtype=dtype), block_size=5)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, S, 3 * 24, generator=generator).to(dtype)
    ends = torch.tensor(pieces).cumsum(0)
    anchors = Anchors(ends, torch.ones_like(ends, dtype=torch.bool))
    embeddings = torch.randn(1, anchors.slots * 5, 24, generator=generator).to(dtype)
    with torch.no_grad():
        trained = drafter(
            features,
            embeddings,
            positions(torch.arange(S), anchors, 5)[None],
            dense_mask(anchors, torch.zeros(S, dtype=torch.int64), 5)[None, None],
            sdpa_attend,
        ).view(anchors.slots, 5, -1)
        cache = ContextCache()
        for block, end in enumerate(ends.tolist()):
            drafter.extend_context(features[:, cache.length : end], cache)
            assert cache.length == end
            x = embeddings[:, block * 5 : block * 5 + 5]
            for _ in range(2):  # a block leaves nothing behind
                served = drafter.decode(x, cache)[0]
                torch.testing.assert_close(served, trained[block], rtol=0, atol=1e-5)


def test_a_block_without_context_is_refused():
    drafter = make_drafter(make_target())
    with pytest.raises(ValueError, match="empty"):
        drafter.decode(torch.zeros(1, 5, 24, dtype=torch.float64), ContextCache())
