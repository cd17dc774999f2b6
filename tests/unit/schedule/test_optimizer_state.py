"""Optimizer state by name: all of it comes back, and another optimizer's is refused."""

from __future__ import annotations

import pytest
import torch

from dflash.config import OptimizerSettings
from dflash.optimization import Optimizer, learning_rate


def make(name, steps=3):
    """An optimizer after ``steps`` steps over a matrix and a gain."""
    draw = torch.Generator().manual_seed(0)
    named = {"fc": torch.randn(4, 3, generator=draw), "norm": torch.ones(4)}
    optimizer = Optimizer(OptimizerSettings(name=name), named, steps=10)
    for number in range(steps):
        gradients = [torch.randn(p.shape, generator=draw) for p in named.values()]
        optimizer.step(number, gradients, 2.0)
    return optimizer


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_comes_back_whole(name):
    saved, other = make(name).tensors(), make(name, steps=0)
    assert not other.tensors()
    other.load({})  # saved before the first step
    other.load(saved)
    assert other.tensors().keys() == saved.keys()
    assert all(torch.equal(other.tensors()[key], value) for key, value in saved.items())


@pytest.mark.parametrize(("of", "into"), [("adamw", "muon"), ("muon", "adamw")])
def test_state_of_another_optimizer_is_refused(of, into):
    """Momentum that is silently not there would be a resume that is none."""
    with pytest.raises(ValueError, match=r"only the (saved state|recipe's optimizer) has"):
        make(into, steps=0).load(make(of).tensors())


def test_a_missing_tensor_is_named():
    saved = make("adamw").tensors()
    del saved["adamw.exp_avg.fc"]
    with pytest.raises(ValueError, match=r"only the recipe's optimizer has adamw\.exp_avg\.fc"):
        make("adamw", steps=0).load(saved)


def test_the_rate_warms_up_to_the_peak_and_falls_to_the_floor():
    settings = OptimizerSettings(learning_rate=1.0, warmup_ratio=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(settings, step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.1 < rates[-1] < 0.2
