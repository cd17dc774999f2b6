"""Loading a target: copies and sharing, freezing, features, the mask token, one-line refusals."""

import json
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash.config import TargetSettings
from dflash.target import load
from dflash.target.byte_tokenizer import save_byte_tokenizer
from dflash.target.load import TargetError, load_targets
from dflash.target.mask_token import choose_mask_token

CPU = torch.device("cpu")


def qwen(rows=264, **changes):
    """A two-layer model with a byte vocabulary."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": rows, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 128, "eos_token_id": 256, "bos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


def save(folder, model):
    """The model with the byte tokenizer."""
    model.save_pretrained(folder)
    save_byte_tokenizer(folder, 128)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("target"), qwen())


def settings(path, **changes):
    return TargetSettings(path=str(path), **({"dtype": "float32"} | changes))


def refused(path, **changes):
    """The refusal's text, which has to be one line."""
    with pytest.raises(TargetError) as caught:
        load_targets(settings(path, **changes), [CPU])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_workers_on_one_device_share_one_copy(folder):
    """Five logical CPU devices are one memory."""
    targets = load_targets(settings(folder), [torch.device("cpu", n) for n in range(5)])
    assert len(targets.replicas) == 5 and len(set(map(id, targets.replicas))) == 1
    assert targets.replicas[0].device == CPU


def test_every_physical_device_has_its_own_copy(folder):
    """Shown with the device `meta`; ties between weights survive the copy."""
    targets = load_targets(settings(folder), [CPU, torch.device("meta"), CPU])
    here, there, again = targets.replicas
    assert here is again and there is not here
    assert {p.device.type for p in there.model.parameters()} == {"meta"}
    assert {p.device.type for p in here.model.parameters()} == {"cpu"}
    tied = qwen(tie_word_embeddings=True)
    copied = load._copy_to(tied, torch.device("meta"))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_target_is_frozen_in_eval_mode_and_of_the_dtype_asked_for(folder, dtype):
    model = load_targets(settings(folder, dtype=dtype), [CPU]).model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_sharded_over_logical_devices_is_one_copy(folder):
    targets = load_targets(settings(folder, placement="sharded"), [CPU, torch.device("cpu", 1)])
    assert targets.replicas[0] is targets.replicas[1]


def test_features_embedding_and_head_are_the_models(folder):
    """Against the model's own forward: the stream after layer 0 and the logits."""
    target = load_targets(settings(folder), [CPU]).replicas[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(256, (1, 20))
    with torch.no_grad():
        whole = model(input_ids=ids, output_hidden_states=True)
    features = target.features(ids, torch.arange(20)[None], (0,))
    torch.testing.assert_close(features, whole.hidden_states[1])
    torch.testing.assert_close(target.embed(ids), whole.hidden_states[0])
    torch.testing.assert_close(target.head(whole.hidden_states[-1].double()), whole.logits)


def test_threads_share_a_copy_without_mixing_features(folder):
    """Four threads with different layers and rows get what they would get alone."""
    target = load_targets(settings(folder), [CPU]).replicas[0]
    place = torch.arange(24)[None]
    rows = [torch.randint(256, (1, 24)) for _ in range(4)]
    layers = [(0,), (1,), (0, 1), (1, 0)]
    alone = [target.features(row, place, ids) for row, ids in zip(rows, layers, strict=True)]
    wrong = []

    def work(number):
        for _ in range(20):
            if not torch.equal(target.features(rows[number], place, layers[number]), alone[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_rope_that_changes_in_the_forward_takes_turns(tmp_path):
    """transformers rewrites the rotary table of length-dependent types: one thread at a time."""
    fixed = load_targets(settings(save(tmp_path / "a", qwen())), [CPU]).replicas[0]
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = save(tmp_path / "b", qwen(rope_parameters=rope))
    moving = load_targets(settings(path), [CPU]).replicas[0]
    assert isinstance(moving._turn, type(threading.Lock()))
    assert not isinstance(fixed._turn, type(threading.Lock()))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert moving.features(ids, ids, (0,)).shape == (1, 4, 32)


def test_missing_and_foreign_folders_are_refused(tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "has no config.json" in refused(tmp_path)
    assert "target.download=true" in refused("nobody/has-this-model-in-a-cache")
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in refused(tmp_path)


def test_bundled_without_one_says_how_to_make_it(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(load, "BUNDLED", tmp_path)
    assert "dflash make-tiny-target" in refused("bundled")
    monkeypatch.setattr(load, "BUNDLED", folder)
    assert load_targets(settings("bundled"), [CPU]).config.hidden_size == 32


def test_models_that_are_not_causal_are_refused(tmp_path):
    config = T5Config(
        vocab_size=264, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    path = save(tmp_path, T5ForConditionalGeneration(config))
    assert refused(path).endswith("T5Config is not a causal language model")


def test_recurrent_and_hybrid_targets_are_refused(tmp_path, folder):
    """They would carry one document into the next, and cannot be rolled back."""
    config = MambaConfig(vocab_size=264, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert "hybrid and recurrent" in refused(save(tmp_path / "m", MambaForCausalLM(config)))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(TargetError, match="linear_attention"):
        load._check("x", model, None)


def test_other_architectures_load(tmp_path):
    """GPT-2 names everything differently."""
    config = GPT2Config(
        vocab_size=264, n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=256,
        bos_token_id=256,
    )  # fmt: skip
    targets = load_targets(settings(save(tmp_path, GPT2LMHeadModel(config))), [CPU])
    ids = torch.arange(8)[None]
    assert targets.replicas[0].features(ids, ids, (0, 1)).shape == (1, 8, 32)


def test_half_a_checkpoint_is_refused(tmp_path, folder):
    """transformers would fill what is missing with random numbers and only warn."""
    path = save(tmp_path / "base", qwen())
    Qwen3Model(qwen().config).save_pretrained(path)
    description = json.loads((path / "config.json").read_text())
    description |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(description))
    assert "lm_head.weight" in refused(path)
    (path / "model.safetensors").write_bytes(b"broken")
    assert str(path) in refused(path)


def test_a_tokenizer_that_does_not_fit_or_is_missing_is_refused(tmp_path):
    assert "only 256 rows" in refused(save(tmp_path / "a", qwen(rows=256, eos_token_id=None)))
    qwen().save_pretrained(tmp_path / "b")
    assert "no tokenizer files" in refused(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_text("{")
    assert "its tokenizer" in refused(tmp_path / "b")


class Tokens:
    """What `choose_mask_token` reads of a tokenizer."""

    def __init__(self, size, mask=None, pad=None, eos=256):
        self.size, self.mask_token_id, self.pad_token_id, self.eos_token_id = size, mask, pad, eos

    def __len__(self):
        return self.size

    def get_vocab(self):
        return {str(n): n for n in range(self.size)}


def test_mask_token_is_the_recipes_then_the_tokenizers_then_the_first_unused_row(folder):
    targets = load_targets(settings(folder), [CPU])
    assert targets.mask_token_id() == 257
    assert targets.mask_token_id(5) == 5
    assert choose_mask_token(targets.model, Tokens(257, mask=7)) == 7


def test_mask_token_is_never_padding_or_the_end():
    """Given, the tokenizer's own, or by being the first unused row."""
    model = qwen(eos_token_id=[256, 258])
    with pytest.raises(TargetError, match="end-of-text"):
        choose_mask_token(model, Tokens(257), 258)
    with pytest.raises(TargetError, match="padding"):
        choose_mask_token(model, Tokens(257, pad=9), 9)
    assert choose_mask_token(model, Tokens(257, mask=257, pad=257)) == 259


def test_mask_token_needs_a_row():
    model = qwen()
    with pytest.raises(TargetError, match="rows 0 to 263"):
        choose_mask_token(model, Tokens(257), 264)
    assert choose_mask_token(model, Tokens(263, mask=300)) == 263
    with pytest.raises(TargetError, match="name a token that never occurs"):
        choose_mask_token(model, Tokens(264))
