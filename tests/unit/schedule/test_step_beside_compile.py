"""An optimizer step that a compile in another thread overlaps gives the same numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from dflash.config import OptimizerSettings
from dflash.optimization import Optimizer

DEADLINE = 60
SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, schedule="constant")
MUON = SETTINGS.model_copy(update={"name": "muon"})


def beside_a_compile(action: Callable[[], None]) -> bool:
    """Runs ``action`` while another thread is inside a compile; whether it saw that compile."""
    inside, done = threading.Event(), threading.Event()

    def backend(module, _inputs):
        inside.set()
        assert done.wait(DEADLINE)
        return module.forward

    def compiling():
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    thread = threading.Thread(target=compiling, name="compiling")
    thread.start()
    try:
        assert inside.wait(DEADLINE), "the compile did not begin"
        saw = torch.compiler.is_compiling()
        action()
    finally:
        done.set()
        thread.join(DEADLINE)
    assert not thread.is_alive()
    return saw


def weights_after(make_step, overlap: bool) -> tuple[torch.Tensor, bool]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 48))
    step = make_step(weight)
    gradients = [torch.randn(64, 48) for _ in range(17)]
    saw = False

    def steps():
        for number, gradient in enumerate(gradients):
            step(number, gradient.clone())

    if overlap:
        saw = beside_a_compile(steps)
    else:
        steps()
    return weight.detach().clone(), saw


def adamw(weight):
    optimizer = Optimizer(SETTINGS, {"weight": weight}, 17)
    return lambda number, gradient: optimizer.step(number, [gradient], 3.0)


def muon(weight):
    gain = torch.nn.Parameter(torch.ones(48))
    optimizer = Optimizer(MUON, {"weight": weight, "gain": gain}, 17)
    return lambda number, gradient: optimizer.step(number, [gradient, gradient[0].clone()], 3.0)


def foreach(weight):
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, foreach=True)

    def step(_number, gradient):
        weight.grad = gradient
        optimizer.step()

    return step


@pytest.mark.parametrize("ours", [adamw, muon])
def test_the_trainers_step_does_not_depend_on_what_compiles_beside_it(ours):
    alone, _ = weights_after(ours, overlap=False)
    beside, saw = weights_after(ours, overlap=True)
    if torch.__version__.startswith("2.13"):
        assert saw, "the danger was not there: nothing was seen compiling"
    assert torch.equal(alone, beside)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the flag is process-wide in 2.13 alone"
)
def test_another_implementation_does_depend_on_it():
    """The control: were both equal here as well, the test above would show nothing."""
    alone, _ = weights_after(foreach, overlap=False)
    beside, saw = weights_after(foreach, overlap=True)
    assert saw and not torch.equal(alone, beside)


@pytest.mark.parametrize("settings", [SETTINGS, MUON])
def test_a_restored_optimizer_goes_on_bit_for_bit(settings):
    def make():
        torch.manual_seed(0)
        named = {"weight": torch.nn.Parameter(torch.randn(8, 6)),
                 "gain": torch.nn.Parameter(torch.ones(6))}  # fmt: skip
        return named, Optimizer(settings, named, 6)

    def step(optimizer, number):
        draw = torch.Generator().manual_seed(number)
        shapes = ((8, 6), (6,))
        optimizer.step(number, [torch.randn(shape, generator=draw) for shape in shapes], 2.0)

    whole, optimizer = make()
    for number in range(6):
        step(optimizer, number)
    first, optimizer = make()
    for number in range(3):
        step(optimizer, number)
    saved, weights = optimizer.tensors(), {n: p.detach().clone() for n, p in first.items()}
    second, optimizer = make()
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(weights[name])
    optimizer.load(saved)
    for number in range(3, 6):
        step(optimizer, number)
    assert all(torch.equal(second[name], whole[name]) for name in whole)
    assert not all(torch.equal(first[name], whole[name]) for name in whole)
