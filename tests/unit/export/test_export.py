"""The published format: fields, tensors, the round trip, and what is refused in one line."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dflash.export import ExportError, export_drafter, load_exported, tensor_shapes
from dflash.model import ContextCache, Drafter, DrafterConfig


def target_config(**change):
    fields = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "eos_token_id": 7,
    }
    return Qwen3Config(**fields | change)


def make_drafter(seed=1, **change):
    fields = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 49}
    config = DrafterConfig.for_target(
        target_config(), **fields | {"target_layer_ids": (1, 4, 6)} | change
    )
    drafter = Drafter(config)
    drafter.init_weights(torch.Generator().manual_seed(seed))
    return drafter


def exported(folder, drafter=None, **change):
    return export_drafter(folder, drafter or make_drafter(), target_config(), **change)


def test_the_config_has_every_published_field_where_each_reader_looks(tmp_path):
    raw = json.loads((exported(tmp_path / "out") / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["dflash_config"]["mask_token_id"] == 49
    assert raw["dflash_config"]["target_layer_ids"] == [1, 4, 6]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert raw["num_target_layers"] == 9 and raw["num_hidden_layers"] == 2
    assert raw["layer_types"] == ["full_attention"] * 2
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1_000_000
    assert raw["rope_scaling"] is None and raw["rope_parameters"]["rope_type"] == "default"
    assert raw["is_causal"] is False and raw["dflash_config"]["causal"] is False
    assert raw["sliding_window"] is None and raw["use_sliding_window"] is False
    assert raw["hidden_act"] == "silu" and raw["dtype"] == "bfloat16" and raw["eos_token_id"] == 7
    assert "auto_map" not in raw


def test_the_weights_are_bf16_under_the_published_names_only(tmp_path):
    tensors = load_file(exported(tmp_path) / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any(name.startswith(("model.", "embed", "lm_head")) for name in tensors)


@pytest.mark.parametrize("bias", [False, True])
def test_the_table_of_shapes_is_the_drafters(bias):
    drafter = make_drafter(attention_bias=bias, head_dim=16, num_attention_heads=6)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert tensor_shapes(drafter.config) == shapes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path, dtype, bias):
    drafter = make_drafter(attention_bias=bias)
    config, tensors = load_exported(exported(tmp_path, drafter, dtype=dtype))
    assert config == drafter.config
    again = Drafter(config)
    again.load_state_dict(tensors, strict=True)
    for name, tensor in drafter.state_dict().items():
        assert tensors[name].dtype == dtype
        assert torch.equal(tensors[name], tensor.to(dtype)), name
        assert torch.equal(again.state_dict()[name], tensor.to(dtype).float()), name


@pytest.mark.parametrize("column", [0, 1, 2])
def test_fc_columns_are_in_the_order_of_the_layer_ids(tmp_path, column):
    """Zeroing one block of columns and zeroing that layer's feature are the same thing."""
    width = 24
    config, tensors = load_exported(exported(tmp_path, dtype=torch.float32))
    features = torch.randn(1, 11, 3 * width, generator=torch.Generator().manual_seed(0))
    cut = slice(column * width, (column + 1) * width)
    block = torch.ones(1, 4, width)

    def served(tensors, features):
        drafter = Drafter(config)
        drafter.load_state_dict(tensors)
        cache = ContextCache()
        with torch.no_grad():
            drafter.extend_context(features, cache)
            return drafter.decode(block, cache)

    without = {name: tensor.clone() for name, tensor in tensors.items()}
    without["fc.weight"][:, cut] = 0
    silent = features.clone()
    silent[..., cut] = 0
    assert torch.equal(served(without, features), served(tensors, silent))
    assert not torch.equal(served(tensors, features), served(tensors, silent))


def test_an_export_replaces_an_earlier_one_and_leaves_nothing_else(tmp_path):
    exported(tmp_path, make_drafter(seed=1))
    exported(tmp_path, make_drafter(seed=2), dtype=torch.float32)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    _, tensors = load_exported(tmp_path)
    assert torch.equal(tensors["fc.weight"], make_drafter(seed=2).fc.weight)


def test_the_card_says_what_was_measured_and_that_the_bonus_is_in_it(tmp_path):
    card = (exported(tmp_path / "a", metrics={"tau (T=0)": "4.321"}) / "README.md").read_text()
    assert "| tau (T=0) | 4.321 |" in card and "bonus token included" in card
    assert "Not measured" in (exported(tmp_path / "b") / "README.md").read_text()
    last = make_drafter(target_layer_ids=(1, 8))
    assert "before* the final norm" in (exported(tmp_path / "c", last) / "README.md").read_text()


def test_the_tokenizer_is_saved_beside_it(tmp_path):
    saved = []
    exported(tmp_path, tokenizer=SimpleNamespace(save_pretrained=saved.append))
    assert saved == [str(tmp_path)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10}, "num_hidden_layers 9, this one has 10"),
        ({"hidden_size": 32}, "hidden_size 24, this one has 32"),
        ({"vocab_size": 51}, "vocab_size 50, this one has 51"),
    ],
)
def test_a_target_that_the_drafter_was_not_made_for_is_refused(tmp_path, change, said):
    with pytest.raises(ExportError, match=said):
        export_drafter(tmp_path, make_drafter(), target_config(**change))
    assert list(tmp_path.iterdir()) == []


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ExportError, match=r"float64.*not one of"):
        exported(tmp_path, dtype=torch.float64)


def tensors_changed(change):
    def damage(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file(change(tensors), path)

    return damage


def config_changed(**change):
    def damage(folder):
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        for name, value in change.items():
            place = raw["dflash_config"] if name.startswith("inner_") else raw
            place[name.removeprefix("inner_")] = value
        path.write_text(json.dumps(raw))

    return damage


FAULTS = {
    "missing": (
        tensors_changed(lambda t: {n: x for n, x in t.items() if n != "fc.weight"}),
        "1 missing: fc.weight",
    ),
    "unknown": (
        tensors_changed(lambda t: t | {"lm_head.weight": torch.ones(2)}),
        "1 unknown: lm_head.weight",
    ),
    "prefixed": (
        tensors_changed(lambda t: {"model." + n: x for n, x in t.items()}),
        r"25 missing: fc\.weight, .*\.\.\.; 25 unknown: model\.",
    ),
    "wrong shape": (
        tensors_changed(lambda t: t | {"norm.weight": torch.ones(25)}),
        r"1 of a wrong shape: norm\.weight \[25\] instead of \[24\]",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: is missing"),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes(b"123"), "cannot be read"),
    "no config": (lambda f: (f / "config.json").unlink(), "not an exported drafter"),
    "cut config": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "expected a mapping"),
    "another architecture": (
        config_changed(architectures=["DFlash2DraftModel"]),
        r"architectures is \['DFlash2DraftModel'\]",
    ),
    "sliding": (
        config_changed(layer_types=["full_attention", "sliding_attention"]),
        "layer_types .* is not supported",
    ),
    "causal": (config_changed(is_causal=True), "is_causal True is not supported"),
    "scaled": (config_changed(rope_scaling={"rope_type": "yarn"}), "rope_type yarn"),
    "capped": (config_changed(inner_final_logit_softcapping=30.0), "softcapping 30.0 is not"),
    "multiplied": (config_changed(inner_output_multiplier=2.0), "output_multiplier 2.0 is not"),
    "two thetas": (config_changed(rope_theta=5.0), "rope_theta is 5.0 at the top and 1000000"),
    "no mask": (config_changed(inner_mask_token_id=None), "has no mask_token_id"),
    "ids outside": (config_changed(inner_target_layer_ids=[1, 4, 9]), "target_layer_ids"),
    "a wider target": (config_changed(inner_target_layer_ids=[1, 4]), r"fc\.weight \[24, 72\]"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_does_not_fit_is_named_in_one_line(tmp_path, kind):
    damage, said = FAULTS[kind]
    damage(exported(tmp_path))
    with pytest.raises(ExportError, match=said) as caught:
        load_exported(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_older_files_with_everything_at_the_top_are_read(tmp_path):
    path = exported(tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    raw |= raw.pop("dflash_config")
    for name in ("causal", "is_causal", "rope_parameters", "eagle_aux_hidden_state_layer_ids"):
        raw.pop(name, None)
    path.write_text(json.dumps(raw))
    assert load_exported(tmp_path)[0] == make_drafter().config
