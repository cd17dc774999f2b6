"""The target's distribution as labels: equal to its definition in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash.config import ObjectiveSettings
from dflash.objective.chunked import block_objective

N, B, H, V = 5, 4, 6, 11


def make(seed=0):
    draw = torch.Generator().manual_seed(seed)
    head = nn.Linear(H, V, bias=False, dtype=torch.float64).requires_grad_(False)
    with torch.no_grad():
        head.weight.normal_(generator=draw)
    hidden = torch.randn(N, B, H, dtype=torch.float64, generator=draw).requires_grad_()
    teacher = torch.randn(N, B, H, dtype=torch.float64, generator=draw)
    labels = torch.randint(V, (N, B), generator=draw)
    counted = torch.rand(N, B, generator=draw) < 0.7
    counted[:, 0] = False
    return head, hidden, teacher, labels, counted


def by_definition(head, hidden, teacher, labels, counted, share, gamma):
    """Loops over slots; torch's autograd makes the gradient."""
    total = hidden.new_zeros(())
    for n in range(N):
        for k in range(1, B):
            if counted[n, k]:
                log_q = torch.log_softmax(head(hidden[n, k]), -1)
                p = torch.softmax(head(teacher[n, k]), -1)
                loss = -(1 - share) * log_q[labels[n, k]] - share * (p * log_q).sum()
                total = total + loss * torch.exp(torch.tensor(-(k - 1) / gamma))
    return total


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_value_and_gradient_are_those_of_the_definition(share, chunk):
    head, hidden, teacher, labels, counted = make()
    settings = ObjectiveSettings(gamma=3.0, teacher_share=share, head_chunk_slots=chunk)
    loss, _ = block_objective(hidden, head, labels, counted, settings, teacher)
    (got,) = torch.autograd.grad(loss.numerator, hidden)
    expected = by_definition(head, hidden, teacher, labels, counted, share, 3.0)
    (want,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(loss.numerator, expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    assert got.abs().sum() > 0


def test_a_drafter_that_equals_its_teacher_gets_no_gradient():
    head, hidden, _, labels, counted = make()
    settings = ObjectiveSettings(gamma=3.0, teacher_share=1.0)
    loss, _ = block_objective(hidden, head, labels, counted, settings, hidden.detach().clone())
    (gradient,) = torch.autograd.grad(loss.numerator, hidden)
    assert gradient.abs().max() < 1e-12


def test_metrics_and_the_unweighted_loss_are_of_the_labels():
    head, hidden, teacher, labels, counted = make()
    results = [
        block_objective(
            hidden, head, labels, counted, ObjectiveSettings(gamma=3.0, teacher_share=s), teacher
        )
        for s in (0.0, 1.0)
    ]
    (hard, hard_metrics), (soft, soft_metrics) = results
    assert torch.equal(hard.unweighted_numerator, soft.unweighted_numerator)
    assert torch.equal(hard_metrics.correct, soft_metrics.correct)
    assert not torch.equal(hard.numerator, soft.numerator)


def test_a_missing_teacher_is_refused():
    head, hidden, _, labels, counted = make()
    settings = ObjectiveSettings(gamma=3.0, teacher_share=0.5)
    with pytest.raises(ValueError, match="needs a teacher"):
        block_objective(hidden, head, labels, counted, settings)
