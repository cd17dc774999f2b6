"""The loss and the metrics are sums that agree with naive float64 loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.objective import block_metrics, decay_weights, decayed_cross_entropy, paper_gamma

N, B, V = 5, 8, 13


def make_batch(seed=0, dtype=torch.float64):
    """Logits, labels and a mask with an empty block; masked labels are out of range on purpose."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, B, V, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (N, B), generator=generator)
    mask = torch.rand(N, B, generator=generator) < 0.7
    mask[:, 0] = False
    mask[2] = False
    return logits, torch.where(mask, labels, -100), mask


def naive(logits, labels, mask, weights):
    """(numerator, denominator, unweighted numerator, count), slot by slot in Python floats."""
    sums = [0.0, 0.0, 0.0, 0]
    for n in range(N):
        for k in range(B):
            if mask[n, k]:
                scores = [float(x) for x in logits[n, k]]
                nats = math.log(sum(math.exp(x) for x in scores)) - scores[int(labels[n, k])]
                w = float(weights[k])
                sums = [sums[0] + w * nats, sums[1] + w, sums[2] + nats, sums[3] + 1]
    return sums


def as_list(sums):
    """The four sums as numbers."""
    return [
        float(x.detach())
        for x in (sums.numerator, sums.denominator, sums.unweighted_numerator, sums.count)
    ]


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0)])
def test_default_decay_is_the_papers(block_size, gamma):
    """w_0 = 0, w_1 = 1, then a factor exp(-1/gamma) from slot to slot."""
    assert paper_gamma(block_size) == gamma
    expected = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    assert decay_weights(block_size).tolist() == pytest.approx(expected)
    assert decay_weights(block_size, 2.5)[3] == pytest.approx(math.exp(-0.8))


def test_uniform_weights_still_leave_slot_zero_out():
    """gamma None = no decay; the anchor's own token is never predicted."""
    assert decay_weights(4, None).tolist() == [0.0, 1.0, 1.0, 1.0]


def test_decay_refuses_what_it_cannot_know():
    """The paper has no gamma for 12; gamma 0 divides by zero."""
    with pytest.raises(ValueError, match="block_size=12"):
        decay_weights(12)
    with pytest.raises(ValueError, match="gamma must be above 0"):
        decay_weights(8, 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", ["paper", None, 1.5])
def test_loss_sums_equal_naive_loops(seed, gamma):
    """In float64 to 1e-10: the weights are in the denominator too, and nothing is averaged."""
    logits, labels, mask = make_batch(seed)
    weights = decay_weights(B, gamma).double()
    expected = naive(logits, labels, mask, weights)
    assert as_list(decayed_cross_entropy(logits, labels, mask, weights)) == pytest.approx(
        expected, rel=1e-10
    )


def test_loss_gradient_is_softmax_minus_label_times_weight():
    """Of the numerator, and zero where the mask is off."""
    logits, labels, mask = make_batch()
    logits.requires_grad_()
    weights = decay_weights(B)
    decayed_cross_entropy(logits, labels, mask, weights).numerator.backward()
    one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), V)
    expected = (logits.detach().softmax(-1) - one_hot) * (weights.double() * mask)[..., None]
    torch.testing.assert_close(logits.grad, expected)


def test_only_the_numerator_carries_a_gradient():
    """The others are for reports and for the one division."""
    logits, labels, mask = make_batch()
    sums = decayed_cross_entropy(logits.requires_grad_(), labels, mask, decay_weights(B))
    assert sums.numerator.requires_grad
    assert not sums.denominator.requires_grad
    assert not sums.unweighted_numerator.requires_grad
    assert sums.count.dtype == torch.int64


def test_sums_of_parts_are_the_sum_of_the_whole():
    """Chunks, micro-steps and drafters pool exactly, unlike means of unequal parts."""
    logits, labels, mask = make_batch()
    weights = decay_weights(B).double()
    whole = decayed_cross_entropy(logits, labels, mask, weights)
    parts = [decayed_cross_entropy(logits[s], labels[s], mask[s], weights)
             for s in (slice(0, 1), slice(1, N))]  # fmt: skip
    assert as_list(parts[0] + parts[1]) == pytest.approx(as_list(whole), rel=1e-12)
    metrics = block_metrics(logits, labels, mask)
    pooled = block_metrics(logits[:2], labels[:2], mask[:2]) + block_metrics(
        logits[2:], labels[2:], mask[2:]
    )
    for name in ("correct", "total", "committed", "blocks"):
        assert torch.equal(getattr(pooled, name), getattr(metrics, name)), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_slot_that_does_not_count_does_no_harm(poison):
    """Neither to the sums nor to the gradient, of its own slot or another's."""
    logits, labels, mask = make_batch()
    weights = decay_weights(B).double()
    expected = as_list(decayed_cross_entropy(logits, labels, mask, weights))
    logits = logits.masked_fill(~mask[..., None], poison).requires_grad_()
    sums = decayed_cross_entropy(logits, labels, mask, weights)
    assert as_list(sums) == pytest.approx(expected, rel=1e-12)
    sums.numerator.backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()


def test_a_row_without_labels_gives_zeros():
    """Not 0/0: the division is somebody else's, after pooling."""
    logits, labels, mask = make_batch()
    logits.requires_grad_()
    sums = decayed_cross_entropy(logits, labels, torch.zeros_like(mask), decay_weights(B))
    assert as_list(sums) == [0, 0, 0, 0]
    sums.numerator.backward()
    assert (logits.grad == 0).all()


def test_bf16_logits_are_summed_in_fp32():
    """1600 slots of about 2.5 nats: a bf16 sum would be off by several."""
    logits, labels, mask = make_batch(dtype=torch.bfloat16)
    many = [x.repeat(50, *[1] * (x.dim() - 1)) for x in (logits, labels, mask)]
    sums = decayed_cross_entropy(*many, decay_weights(B))
    assert sums.numerator.dtype == torch.float32
    expected = [50 * x for x in naive(logits.double(), labels, mask, decay_weights(B))]
    assert as_list(sums) == pytest.approx(expected, rel=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    """Broadcasting would turn a missing dimension into a plausible number."""
    logits, labels, mask = make_batch()
    with pytest.raises(ValueError, match="do not fit"):
        decayed_cross_entropy(logits, labels[:1], mask, decay_weights(B))
    with pytest.raises(ValueError, match=r"weights must be \[B\] = \[8\]"):
        decayed_cross_entropy(logits, labels, mask, torch.ones(1))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_metrics_equal_naive_counts(data):
    """Accuracy per slot; acceptance = leading correct counting slots + 1 bonus, per block."""
    row = st.lists(st.booleans(), min_size=B, max_size=B)
    right = data.draw(st.lists(row, min_size=1, max_size=4))
    mask = data.draw(st.lists(row, min_size=len(right), max_size=len(right)))
    for line in mask:
        line[0] = False
    labels = torch.randint(V, (len(right), B), generator=torch.Generator().manual_seed(1))
    best = torch.where(torch.tensor(right), labels, (labels + 1) % V)
    logits = torch.nn.functional.one_hot(best, V).float()
    got = block_metrics(logits, labels, torch.tensor(mask))

    committed = blocks = 0
    for r, m in zip(right, mask, strict=True):
        if any(m):
            blocks += 1
            committed += 1
            for k in range(1, B):
                if not (r[k] and m[k]):
                    break
                committed += 1
    assert (got.committed.item(), got.blocks.item()) == (committed, blocks)
    for k in range(B):
        assert got.total[k] == sum(m[k] for m in mask)
        assert got.correct[k] == sum(r[k] and m[k] for r, m in zip(right, mask, strict=True))


def test_a_perfect_block_commits_block_size_tokens():
    """B-1 drafted + 1 bonus: the number is comparable with the paper's tau."""
    labels = torch.arange(B)[None]
    mask = torch.arange(B)[None] >= 1
    got = block_metrics(torch.nn.functional.one_hot(labels, V).float(), labels, mask)
    assert (got.committed.item(), got.blocks.item()) == (B, 1)
