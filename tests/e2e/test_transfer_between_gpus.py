"""Copies between real devices; the order of calls is tested without a GPU in tests/unit."""

from __future__ import annotations

import pytest
import torch

from dflash import transfer


@pytest.mark.gpu1
def test_pinned_copies_and_events_on_a_real_gpu():
    gpu = torch.device("cuda", 0)
    there = transfer.to_device(torch.arange(1000), gpu)
    moved, ready = transfer.send(there, gpu)
    assert transfer.receive(moved, ready, gpu).sum().item() == 499500


@pytest.mark.gpu8
def test_features_cross_between_real_gpus():
    a, b = torch.device("cuda", 0), torch.device("cuda", 1)
    features = torch.randn(2048, 2048, device=a) @ torch.randn(2048, 2048, device=a)
    moved, ready = transfer.send(features, b)
    assert torch.equal(transfer.receive(moved, ready, b).cpu(), features.cpu())
