"""The chunked objective equals the one on whole logits, in value, gradient and metrics."""

import math

import pytest
import torch
from torch import nn

from dflash.config import ObjectiveSettings
from dflash.objective import block_metrics, decay_weights, decayed_cross_entropy
from dflash.objective.chunked import block_objective
from dflash.objective.dpace import dpace_weights
from dflash.objective.weighting import WEIGHTINGS

N, B, H, V = 9, 8, 12, 37


class Head(nn.Linear):
    """A frozen head that remembers how many rows it was given at a time."""

    def __init__(self, dtype=torch.float32, bias=False):
        torch.manual_seed(5)
        super().__init__(H, V, bias=bias, dtype=dtype)
        self.requires_grad_(False)
        self.rows = []

    def forward(self, x):
        self.rows.append(x.shape[0])
        return super().forward(x)


def make_batch(seed=0, dtype=torch.float32):
    """Hidden states with gradient, labels (out of range where masked) and a mask."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, B, H, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(V, (N, B), generator=generator)
    counted = torch.rand(N, B, generator=generator) < 0.7
    counted[:, 0] = False
    counted[4] = False
    return hidden, torch.where(counted, labels, -100), counted


def unchunked(hidden, head, labels, counted, weighting, settings):
    """(numerator with gradient, denominator, unweighted) from full logits by autograd."""
    logits = nn.functional.linear(hidden, head.weight.to(hidden.dtype), head.bias)
    each = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
    ).view(N, B)
    slot = torch.arange(B)
    weights = {
        "uniform": counted.to(each),
        "decay": torch.exp(-(slot - 1) / settings.gamma) * counted if settings.gamma else None,
        "dpace": dpace_weights(each.detach(), counted, settings.dpace_alpha),
    }[weighting]
    return (each * weights).sum(), weights.sum(), (each * counted).sum().detach()


@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
@pytest.mark.parametrize("chunk", [1, 20, 10_000])
def test_chunks_change_neither_value_nor_gradient(weighting, chunk):
    """fp32, to 1e-6, for every weighting and for chunks of one block, of two, and of all."""
    settings = ObjectiveSettings(weighting=weighting, gamma=3.0, head_chunk_slots=chunk)
    hidden, labels, counted = make_batch()
    loss, _ = block_objective(hidden, Head(), labels, counted, settings)
    loss.numerator.backward()
    got, hidden.grad = hidden.grad, None
    numerator, denominator, unweighted = unchunked(
        hidden, Head(), labels, counted, weighting, settings
    )
    numerator.backward()
    assert loss.numerator.item() == pytest.approx(numerator.item(), rel=1e-6)
    assert loss.denominator.item() == pytest.approx(denominator.item(), rel=1e-6)
    assert loss.unweighted_numerator.item() == pytest.approx(unweighted.item(), rel=1e-6)
    assert int(loss.count) == int(counted.sum())
    torch.testing.assert_close(got, hidden.grad, rtol=1e-6, atol=1e-6)


def test_paper_decay_equals_the_loss_on_whole_logits():
    """gamma None: the paper's; the same four sums as `decayed_cross_entropy`."""
    hidden, labels, counted = make_batch(1)
    head = Head()
    loss, _ = block_objective(hidden, head, labels, counted, ObjectiveSettings())
    whole = decayed_cross_entropy(head(hidden), labels, counted, decay_weights(B))
    for name in ("numerator", "denominator", "unweighted_numerator", "count"):
        assert getattr(loss, name).item() == pytest.approx(getattr(whole, name).item(), rel=1e-6)


def test_gradient_is_the_numerical_one():
    """fp64 finite differences; uniform weights, since others are constants by definition."""
    hidden, labels, counted = make_batch(2, torch.float64)
    settings = ObjectiveSettings(weighting="uniform", head_chunk_slots=16)
    head = Head(torch.float64, bias=True)

    def numerator(x):
        return block_objective(x, head, labels, counted, settings)[0].numerator

    assert torch.autograd.gradcheck(numerator, (hidden,), fast_mode=True)


def test_metrics_come_from_the_same_pass():
    """Equal to `block_metrics`, with each counting slot through the head once and no other."""
    hidden, labels, counted = make_batch(3)
    head = Head()
    labels = torch.where(counted & (torch.rand(N, B) < 0.6), head(hidden).argmax(-1), labels)
    expected = block_metrics(head(hidden), labels, counted)
    head.rows.clear()
    _, metrics = block_objective(
        hidden, head, labels, counted, ObjectiveSettings(head_chunk_slots=14)
    )
    assert int(expected.correct.sum()) > 10
    for name in ("correct", "total", "committed", "blocks"):
        assert torch.equal(getattr(metrics, name), getattr(expected, name)), name
    assert sum(head.rows) == int(counted.sum())
    assert max(head.rows) <= 14


def test_a_slot_that_does_not_count_cannot_poison():
    """NaN there leaves value and gradient alone; NaN where it counts shows in the sum."""
    hidden, labels, counted = make_batch(4)
    settings = ObjectiveSettings(weighting="dpace")
    clean, _ = block_objective(hidden, Head(), labels, counted, settings)
    poisoned = hidden.detach().masked_fill(~counted[..., None], math.nan).requires_grad_()
    loss, _ = block_objective(poisoned, Head(), labels, counted, settings)
    loss.numerator.backward()
    assert loss.numerator.item() == clean.numerator.item()
    assert poisoned.grad[~counted].eq(0).all() and poisoned.grad.isfinite().all()
    broken = hidden.detach().masked_fill(counted[..., None], math.nan)
    assert block_objective(broken, Head(), labels, counted, settings)[0].numerator.isnan()


def test_bf16_hidden_states_are_summed_in_fp32():
    """bf16 in and a bf16 head: within bf16 rounding of fp32, and sums that keep their digits."""
    hidden, labels, counted = make_batch(5)
    low = hidden.detach().bfloat16().requires_grad_()
    settings = ObjectiveSettings(weighting="uniform", head_chunk_slots=16)
    head = Head()
    loss, _ = block_objective(low, Head(torch.bfloat16), labels, counted, settings)
    loss.numerator.backward()
    exact, _ = block_objective(hidden, head, labels, counted, settings)
    exact.numerator.backward()
    assert loss.numerator.dtype == torch.float64
    assert loss.numerator.item() == pytest.approx(exact.numerator.item(), rel=5e-3)
    assert low.grad.dtype == torch.bfloat16
    error = (low.grad.float() - hidden.grad).norm() / hidden.grad.norm()
    assert error < 2e-2


def test_a_head_that_needs_its_output_backward():
    """A capped head: its tanh's backward reads what the chunk would otherwise overwrite."""
    head = nn.Sequential(Head(), nn.Tanh())
    hidden, labels, counted = make_batch(6)
    settings = ObjectiveSettings(weighting="uniform", head_chunk_slots=16)
    loss, _ = block_objective(hidden, head, labels, counted, settings)
    loss.numerator.backward()
    got, hidden.grad = hidden.grad, None
    decayed_cross_entropy(
        head(hidden), labels, counted, decay_weights(B, None)
    ).numerator.backward()
    torch.testing.assert_close(got, hidden.grad, rtol=1e-5, atol=1e-6)


def test_upstream_gradient_scales_and_the_head_gets_none():
    """Numerators may be scaled before backward; even an unfrozen head is a constant."""
    head = Head().requires_grad_(True)
    hidden, labels, counted = make_batch(7)
    settings = ObjectiveSettings()
    block_objective(hidden, head, labels, counted, settings)[0].numerator.backward()
    once, hidden.grad = hidden.grad.clone(), None
    (3 * block_objective(hidden, head, labels, counted, settings)[0].numerator).backward()
    torch.testing.assert_close(hidden.grad, 3 * once)
    assert head.weight.grad is None


def test_no_gradient_where_none_is_wanted():
    """Evaluation under no_grad, and a batch in which nothing counts."""
    hidden, labels, counted = make_batch(8)
    with torch.no_grad():
        assert not block_objective(hidden, Head(), labels, counted, ObjectiveSettings())[
            0
        ].numerator.requires_grad
    loss, metrics = block_objective(
        hidden, Head(), labels, torch.zeros_like(counted), ObjectiveSettings()
    )
    loss.numerator.backward()
    assert loss.numerator.item() == 0 and int(metrics.blocks) == 0
    assert hidden.grad.eq(0).all()


def test_chunked_loss_says_what_does_not_fit():
    hidden, labels, counted = make_batch()
    with pytest.raises(ValueError, match="do not fit"):
        block_objective(hidden[0], Head(), labels, counted, ObjectiveSettings())
    counted[0, 0] = True
    with pytest.raises(ValueError, match="slot 0 counts"):
        block_objective(hidden, Head(), labels, counted, ObjectiveSettings())
