"""The tiny target: its tokenizer, its sources, its training, and how good it is said to be."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dflash.data.errors import DataError
from dflash.data.stdlib import is_held_out, stdlib_sources
from dflash.target.bits import bits_per_byte
from dflash.target.byte_tokenizer import END_OF_TEXT_ID, byte_tokenizer, save_byte_tokenizer
from dflash.target.errors import TargetError
from dflash.target.tiny import TinySettings, make_tiny_target
from dflash.target.tiny_card import HELD_OUT_LIST

SMALL = TinySettings(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=32, tokens_per_step=256, row_tokens=32, long_row_tokens=64,
    warmup_steps=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A small tree of Python files with some held out."""
    root = tmp_path_factory.mktemp("lib")
    for number in range(80):
        (root / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    return stdlib_sources(root)


@pytest.fixture(scope="module")
def made(sources, tmp_path_factory):
    """A target of six steps, what its training said, and its bits per byte."""
    folder = tmp_path_factory.mktemp("made") / "tiny"
    said = []
    bits = make_tiny_target(
        folder, steps=6, settings=SMALL, sources=sources, log_every=2, save_every=4, say=said.append
    )
    return folder, said, bits


class FixedModel(torch.nn.Module):
    """Gives byte 97 a logit of 3 everywhere, and remembers nothing."""

    def __init__(self):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 264)
        logits[..., 97] = 3.0
        return type("Output", (), {"logits": logits})


class LookBack(FixedModel):
    """Is certain of the token after a run that it has seen at least `needed` tokens of."""

    def __init__(self, needed):
        super().__init__()
        self.needed = needed

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 264)
        logits[:, self.needed :, 97] = 1000.0
        return type("Output", (), {"logits": logits})


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_becomes_its_bytes_and_comes_back(text):
    """Token i is byte i; nothing is cleaned, normalised or unknown (the end's name aside)."""
    assume("<|endoftext|>" not in text)
    tokenizer = byte_tokenizer(10_000)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_loads_offline(tmp_path):
    """AutoTokenizer finds it by folder; all 256 bytes are tokens; the end of text is one, too."""
    save_byte_tokenizer(tmp_path, 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "def f():\n\treturn 'é \x00'  # 日本\r\n .\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 257 and len(set(tokenizer.get_vocab().values())) == 257
    assert tokenizer.eos_token_id == END_OF_TEXT_ID
    assert tokenizer("a<|endoftext|>b")["input_ids"] == [97, END_OF_TEXT_ID, 98]


def test_split_is_by_path_alone(sources, tmp_path):
    """Disjoint, complete, and the same for a file wherever the tree lies and whatever else is."""
    train, held_out = set(sources.train), set(sources.held_out)
    assert not train & held_out and len(train | held_out) == 80
    name = sources.held_out[0].name
    (tmp_path / name).write_text("x = 1\n")
    (tmp_path / sources.train[0].name).write_text("x = 1\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "m1.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    again = stdlib_sources(tmp_path)
    assert [path.name for path in again.held_out] == [name]
    assert [path.name for path in again.train] == [sources.train[0].name]


def test_about_three_percent_is_held_out():
    share = sum(is_held_out(f"a/b{n}.py") for n in range(10_000)) / 10_000
    assert share == pytest.approx(0.03, abs=0.006)


def test_a_tree_without_held_out_files_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="held-out Python files"):
        stdlib_sources(tmp_path)


@pytest.mark.parametrize("window", [4, 7, 64])
def test_bits_count_every_byte_once(tmp_path, window):
    """Against the formula, for a model that needs no context; several files, in small windows."""
    texts = ["aab", "a" * 23 + "é", "b"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
    each = math.log2(263 + math.exp(3))
    size = sum(len(text.encode()) for text in texts)
    expected = each - sum(text.count("a") for text in texts) * 3 / math.log(2) / size
    files = sorted(tmp_path.iterdir())
    got = bits_per_byte(FixedModel(), files, byte_tokenizer(64), window=window, batch=3)
    assert got == pytest.approx(expected, rel=1e-5)


def test_bits_give_each_byte_half_a_window(tmp_path):
    """A model that needs half a window of context pays for the first half window only."""
    (tmp_path / "a.py").write_text("a" * 50)
    files = [tmp_path / "a.py"]
    got = bits_per_byte(LookBack(8), files, byte_tokenizer(64), window=16)
    assert got == pytest.approx(8 * math.log2(264) / 50, rel=1e-4)
    assert bits_per_byte(LookBack(9), files, byte_tokenizer(64), window=16) > got * 1.5


def test_bits_of_nothing_are_refused(tmp_path):
    (tmp_path / "a.py").write_text("")
    with pytest.raises(ValueError, match="no text"):
        bits_per_byte(FixedModel(), [tmp_path / "a.py"], byte_tokenizer(64))


def test_making_writes_a_model_a_card_and_the_held_out_list(made, sources):
    """Everything that `target.path` and a reader need; nothing left beside it."""
    folder, said, bits = made
    assert {"README.md", HELD_OUT_LIST, "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert (folder / HELD_OUT_LIST).read_text().split() == [p.name for p in sources.held_out]
    card = (folder / "README.md").read_text()
    assert f"**{bits:.3f}**" in card and "--steps 6" in card
    assert [line.split()[1] for line in said[:-1]] == ["2/6", "4/6", "6/6"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    # Independent of the code under test: an untrained model needs log2(264) = 8.04 bits.
    assert bits < 8.0


def test_stopped_and_continued_equals_uninterrupted(made, sources, tmp_path):
    """Killed after step 4's save, then resumed: the same bytes of weights as without the stop."""
    folder = tmp_path / "tiny"

    def stop(line):
        if line.startswith("step 6"):
            raise KeyboardInterrupt

    arguments = {"steps": 6, "settings": SMALL, "sources": sources, "log_every": 2, "save_every": 4}
    with pytest.raises(KeyboardInterrupt):
        make_tiny_target(folder, **arguments, say=stop)
    assert (folder / "config.json").is_file()  # what was reached is a complete model
    make_tiny_target(folder, **arguments, resume=True, say=lambda _: None)
    weights = [(f / "model.safetensors").read_bytes() for f in (folder, made[0])]
    assert weights[0] == weights[1]


def test_tiny_target_says_what_is_wrong(made, sources, tmp_path):
    """Each fault of the arguments in one line."""
    folder = made[0]
    with pytest.raises(TargetError, match="is not empty"):
        make_tiny_target(folder, steps=1, sources=sources)
    with pytest.raises(TargetError, match="nothing to resume"):
        make_tiny_target(tmp_path / "new", steps=1, sources=sources, resume=True)
    with pytest.raises(TargetError, match="steps must be at least 1"):
        make_tiny_target(tmp_path / "new", steps=0, sources=sources)
    assert not (tmp_path / "new").exists()


def test_resuming_another_run_is_refused(sources, tmp_path):
    """A state with another seed is not this run's."""
    folder = tmp_path / "tiny"

    def stop(line):
        raise KeyboardInterrupt

    arguments = {"steps": 4, "settings": SMALL, "sources": sources, "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        make_tiny_target(folder, **arguments, log_every=3, say=stop)
    with pytest.raises(TargetError, match="other seed: 0"):
        make_tiny_target(folder, **arguments, seed=1, resume=True)
