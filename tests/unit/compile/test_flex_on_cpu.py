"""flex_attention trains on CPU while the context is open, and only then."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from dflash.compile.flex_on_cpu import flex_training_on_cpu, training_backend


def query(device="cpu", requires_grad=True):
    """What the device check looks at."""
    return SimpleNamespace(device=torch.device(device), requires_grad=requires_grad)


def train(attend):
    """Output and the three gradients of one causal attention, [1, 2, 128, 16] each."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 128, 16, generator=generator).requires_grad_() for _ in range(3)]
    out = attend(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def compare():
    def causal(_b, _h, q, k):
        return q >= k

    mask = flex.create_block_mask(causal, None, None, 128, 128, device="cpu")
    compiled = torch.compile(flex.flex_attention, backend=training_backend("cpu"), dynamic=False)

    def attend(q, k, v):
        return compiled(q, k, v, block_mask=mask)

    def refused():
        try:
            train(attend)
        except Exception as error:
            return str(error)
        return ""

    before = refused()
    with flex_training_on_cpu():
        got = train(attend)
    reference = train(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    errors = [float((a - b).abs().max()) for a, b in zip(got, reference, strict=True)]
    return [before, errors, refused()]


def test_trains_like_sdpa_while_open_and_is_refused_otherwise(isolated):
    """Forward and all three gradients agree with SDPA to float rounding."""
    before, errors, after = isolated(compare)
    assert "does not support backward on CPU" in before
    assert "does not support backward on CPU" in after
    assert max(errors) < 2e-5


def test_other_devices_are_still_checked():
    """The check is lifted for cpu tensors alone."""
    with flex_training_on_cpu():
        flex._validate_device(query("cpu"), query(), query())
        flex._validate_device(query("cuda"), query(), query())
        for device in ("mps", "meta"):
            with pytest.raises((NotImplementedError, ValueError)):
                flex._validate_device(query(device), query(device), query(device))


def test_restored_also_after_an_error_and_when_nested():
    """The very function that was there before."""
    check = flex._validate_device
    with contextlib.suppress(KeyError), flex_training_on_cpu():
        assert flex._validate_device is not check
        raise KeyError
    assert flex._validate_device is check
    with flex_training_on_cpu():
        with flex_training_on_cpu():
            pass
        flex._validate_device(query("cpu"), query(), query())
    assert flex._validate_device is check


def test_backend_by_device():
    """A logical cpu device is a cpu; a device that cannot train is an error that says so."""
    assert training_backend("cpu:3") == training_backend(torch.device("cpu")) == "aot_eager"
    assert training_backend("cuda:1") == "inductor"
    with pytest.raises(ValueError, match="does not train on 'mps'"):
        training_backend("mps")
