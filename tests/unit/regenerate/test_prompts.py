"""Prompts for `dflash eval`: none picked, each record whole."""

from __future__ import annotations

import json

import pytest

from dflash.data import DataError
from dflash.prompts import read_prompts
from dflash.target.byte_tokenizer import byte_tokenizer


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer(1024)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def read(tokenizer, *paths, **arguments):
    return [tokenizer.decode(ids) for ids in read_prompts(paths, tokenizer, **arguments)]


def test_of_a_plain_file_beginning_middle_and_end(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    assert read(tokenizer, path, prompt_tokens=4) == ["abcd", "defg", "ghij"]
    assert read(tokenizer, path, prompt_tokens=64) == ["abcdefghij"]


def test_records_are_prompts_as_they_are(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no")]
    records = [
        {"text": "a long text of a record"},
        {"messages": [{"role": role, "content": said} for role, said in turns]},
        {"input_ids": [104, 105, 106], "prompt_length": 2},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(tokenizer, path, prompt_tokens=4) == [
        "a long text of a record",
        "<user>hi;<assistant>yes;<user>so;<assistant>",
        "hi",
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("a.jsonl", "{", "cannot be read as a prompt"), ("a.txt", "", "holds no prompt")],
)
def test_what_holds_no_prompt_is_one_line(tokenizer, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        read(tokenizer, tmp_path / name)
