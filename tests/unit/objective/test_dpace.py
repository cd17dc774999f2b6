"""D-PACE weights agree with the formulas, slot by slot in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.objective.dpace import dpace_weights


def naive(ce, mask, alpha):
    """The formulas of the module's docstring, one slot after the other."""
    blocks, slots = mask.shape
    weights = [[0.0] * slots for _ in range(blocks)]
    for n in range(blocks):
        run, product = [], 1.0
        for k in range(slots):
            if mask[n, k]:
                product *= (1 - alpha) * math.exp(-float(ce[n, k])) + alpha
            run.append(product)
        for k in range(slots):
            if mask[n, k]:
                weights[n][k] = sum(run[m] for m in range(k, slots) if mask[n, m])
    return torch.tensor(weights, dtype=torch.float64)


def make_blocks(seed, blocks=4, slots=7):
    generator = torch.Generator().manual_seed(seed)
    ce = torch.rand(blocks, slots, generator=generator, dtype=torch.float64) * 4
    mask = torch.rand(blocks, slots, generator=generator) < 0.7
    mask[:, 0] = False
    return ce, mask


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), alpha=st.sampled_from([0.05, 0.3, 0.5, 1.0]))
def test_dpace_equals_the_formulas(seed, alpha):
    """arXiv 2605.18810, also with masked slots in the middle of a block."""
    ce, mask = make_blocks(seed)
    torch.testing.assert_close(dpace_weights(ce, mask, alpha), naive(ce, mask, alpha))


def test_dpace_by_hand():
    """alpha 0.5, probabilities 1, 1/2, 0 -> s = 1, 3/4, 1/2 -> P = 1, 3/4, 3/8."""
    ce = torch.tensor([[9.0, 0.0, math.log(2.0), math.inf]])
    mask = torch.tensor([[False, True, True, True]])
    weights = dpace_weights(ce, mask, 0.5)
    assert weights.tolist()[0] == pytest.approx([0.0, 1 + 3 / 4 + 3 / 8, 3 / 4 + 3 / 8, 3 / 8])


def test_alpha_one_counts_the_slots_that_follow():
    """Without confidence in it, a slot's weight is how many counting slots it opens the way to."""
    mask = torch.tensor([[False, True, False, True, True]])
    assert dpace_weights(torch.rand(1, 5), mask, 1.0).tolist() == [[0.0, 3.0, 0.0, 2.0, 1.0]]


def test_masked_slots_do_not_matter():
    """Whatever stands there, NaN included."""
    ce, mask = make_blocks(3)
    poisoned = ce.masked_fill(~mask, math.nan)
    assert torch.equal(dpace_weights(poisoned, mask, 0.5), dpace_weights(ce, mask, 0.5))


def test_dpace_weights_carry_no_gradient():
    """They are constants of the step."""
    ce, mask = make_blocks(1)
    assert not dpace_weights(ce.requires_grad_(), mask, 0.5).requires_grad


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.5])
def test_dpace_refuses_a_degenerate_alpha(alpha):
    ce, mask = make_blocks(1)
    with pytest.raises(ValueError, match="alpha must be in"):
        dpace_weights(ce, mask, alpha)


def test_dpace_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match="one shape"):
        dpace_weights(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool), 0.5)
