"""The target's last hidden states beside its features, and which of them teaches which slot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.learner import Learner
from dflash.objective import Anchors
from dflash.schedule.exchange import Packet
from dflash.target.capture import capture_features, capture_with_final


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=41, hidden_size=24, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def test_features_are_the_same_and_the_head_makes_the_targets_logits(model):
    ids = torch.arange(20)[None]
    features, final = capture_with_final(model, ids, [2, 0])
    assert torch.equal(features, capture_features(model, ids, [2, 0]))
    torch.testing.assert_close(model.lm_head(final), model(ids).logits)


def test_a_slot_is_taught_by_the_position_before_its_token():
    final = torch.arange(10.0)[None, :, None].expand(1, 10, 3)
    anchors = Anchors(torch.tensor([0, 4, 8]), torch.tensor([True, True, True]))
    packet = Packet(0, 0, None, anchors, final, teacher=final)
    learner = SimpleNamespace(config=SimpleNamespace(block_size=4), device=torch.device("cpu"))
    taught = Learner._teacher(learner, packet)
    assert taught.shape == (3, 4, 3)
    assert taught[:, 1:, 0].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 9]]  # the row ends at 9
    assert Learner._teacher(learner, Packet(0, 0, None, anchors, final)) is None
