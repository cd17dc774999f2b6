"""The drafter's shape and objective have to fit the target; what does not is one line."""

from __future__ import annotations

import pytest
from transformers import Gemma2Config, Qwen3Config

from dflash.config import RecipeError, make_recipe
from dflash.train import drafter_config

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50,
}  # fmt: skip


class Target:
    def __init__(self, config):
        self.config = config

    def mask_token_id(self, explicit):
        return 49


def of(config, **sections):
    tree = {"data": {"train": ["a"]}, "run": {"steps": 1}, "drafter": {"num_hidden_layers": 2}}
    return drafter_config(make_recipe(tree | sections), Target(config))


def test_a_teacher_needs_the_targets_own_distribution():
    """A capped target's head gives other logits than the target: learning them would be wrong."""
    taught = {"objective": {"teacher_share": 0.5}}
    with pytest.raises(RecipeError, match="this target has final_logit_softcapping") as caught:
        of(Gemma2Config(**SMALL), **taught)
    assert "\n" not in str(caught.value)
    assert of(Gemma2Config(**SMALL)).num_hidden_layers == 2
    assert of(Qwen3Config(**SMALL), **taught).num_hidden_layers == 2


def test_a_shape_that_does_not_fit_is_the_recipes_fault():
    with pytest.raises(RecipeError, match=r"drafter: target_layer_ids=.* names a layer twice"):
        of(Qwen3Config(**SMALL), drafter={"target_layer_ids": [1, 1]})
