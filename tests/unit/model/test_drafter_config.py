"""The drafter's configuration: the layer rule, what is refused, and shaping it after a target."""

import pytest
from transformers import LlamaConfig, Qwen3Config

from dflash.model import DrafterConfig, default_target_layer_ids

GOOD = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "target_hidden_size": 32,
    "num_target_layers": 6,
    "target_layer_ids": (1, 3),
    "block_size": 4,
    "mask_token_id": 63,
    "vocab_size": 64,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize(
    ("depth", "n", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-4B, Qwen3-8B
        (32, 5, (1, 8, 15, 22, 29)),  # Qwen3.5-4B
        (40, 5, (1, 10, 19, 28, 37)),  # Qwen3.5-35B-A3B
        (64, 5, (1, 16, 31, 46, 61)),  # Qwen3.6-27B
        (28, 5, (1, 7, 13, 19, 25)),  # LongCat-Flash
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),  # Qwen3.5-35B-A3B, newer
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),  # Qwen3.5-122B
        (9, 3, (1, 4, 6)),  # 3.5 goes to even 4
        (7, 3, (1, 2, 4)),  # 2.5 goes to even 2
        (36, 1, (18,)),
        (1, 1, (0,)),
    ],
)
def test_default_layers_are_those_of_the_released_drafters(depth, n, ids):
    """Ids of published configs, and the two directions of round-half-to-even."""
    assert default_target_layer_ids(depth, n) == ids


@pytest.mark.parametrize(("depth", "n"), [(4, 2), (3, 2), (6, 4), (2, 5)])
def test_default_layers_refuse_a_target_that_is_too_shallow(depth, n):
    """Never a repeated or negative layer: the caller is told to name layers."""
    with pytest.raises(ValueError, match="target_layer_ids"):
        default_target_layer_ids(depth, n)


def test_default_layers_need_at_least_one():
    """Zero features is no drafter."""
    with pytest.raises(ValueError, match="num_features must be at least 1"):
        default_target_layer_ids(36, 0)


def test_order_of_layers_is_kept():
    """Order is the order of the feature columns; it need not ascend."""
    config = DrafterConfig(**GOOD | {"target_layer_ids": [3, 0]})
    assert config.target_layer_ids == (3, 0)
    assert config.num_features == 2
    assert config.feature_size == 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"mask_token_id": 64}, "mask_token_id=64"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": (1, 1)}, "target_layer_ids.*twice"),
        ({"target_layer_ids": (1, 6)}, r"target_layer_ids.*\[6\].*\[0, 5\]"),
        ({"target_layer_ids": (-1, 2)}, r"target_layer_ids.*\[-1\]"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"blok_size": 4}, "unknown field 'blok_size'; did you mean 'block_size'"),
    ],
)
def test_a_bad_field_is_refused_in_one_line_that_names_it(change, said):
    """Errors are read at night."""
    with pytest.raises(ValueError, match=said) as caught:
        DrafterConfig(**GOOD | change)
    assert "\n" not in str(caught.value)


def test_a_missing_rope_base_is_not_guessed():
    """A default here would be a silently wrong drafter for most targets."""
    with pytest.raises(ValueError, match="rope_theta is required"):
        DrafterConfig(**{name: value for name, value in GOOD.items() if name != "rope_theta"})


def test_config_is_frozen():
    """Several threads hold one config."""
    config = DrafterConfig(**GOOD)
    with pytest.raises(ValueError, match="frozen"):
        config.block_size = 8


def test_round_trip_through_json():
    """Checkpoints keep the config as JSON."""
    config = DrafterConfig(**GOOD)
    assert DrafterConfig.model_validate_json(config.model_dump_json()) == config


def test_for_target_takes_shapes_from_the_target():
    """Everything that must match the target does; what is named wins."""
    target = Qwen3Config(
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=100,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
        max_position_embeddings=512,
    )
    config = DrafterConfig.for_target(target, num_hidden_layers=3, block_size=8, mask_token_id=99)
    assert config == DrafterConfig(
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        target_hidden_size=40,
        num_target_layers=9,
        target_layer_ids=(1, 4, 6),
        block_size=8,
        mask_token_id=99,
        vocab_size=100,
        rms_norm_eps=1e-5,
        rope_theta=5e6,
        max_position_embeddings=512,
    )
    named = DrafterConfig.for_target(
        target,
        num_hidden_layers=3,
        block_size=8,
        mask_token_id=99,
        num_features=2,
        intermediate_size=16,
        rope_theta=7.0,
    )
    assert named.target_layer_ids == (1, 6)
    assert (named.intermediate_size, named.rope_theta) == (16, 7.0)
    chosen = DrafterConfig.for_target(
        target, num_hidden_layers=3, block_size=8, mask_token_id=99, target_layer_ids=[8, 0]
    )
    assert chosen.target_layer_ids == (8, 0)


def test_for_target_derives_head_dim_where_the_target_states_none():
    """Llama configs may leave head_dim out."""
    target = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=6
    )
    config = DrafterConfig.for_target(target, num_hidden_layers=2, block_size=4, mask_token_id=3)
    assert config.head_dim == 8
    assert config.num_key_value_heads == 4


def test_for_target_refuses_two_answers_to_one_question():
    """num_features and target_layer_ids must not disagree."""
    with pytest.raises(ValueError, match="num_features=3 but target_layer_ids has 2"):
        DrafterConfig.for_target(
            Qwen3Config(num_hidden_layers=9),
            num_hidden_layers=3,
            block_size=8,
            mask_token_id=3,
            num_features=3,
            target_layer_ids=[1, 2],
        )
