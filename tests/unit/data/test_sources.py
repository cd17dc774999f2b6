"""Sources: what is read, in which order, and what becomes of lines that are no sample."""

from __future__ import annotations

import json
import os

import pytest

from dflash.data import BadLine, DataError, Sample, data_files, read_samples

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(path, *lines):
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def read(*paths, format="auto"):
    return list(read_samples(paths, format))


def test_each_record_shape_becomes_a_sample(tmp_path):
    """OpenAI-like and sharegpt-like conversations say the same; line numbers count blank lines."""
    path = write(
        tmp_path / "a.jsonl",
        {"messages": CHAT},
        "",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"text": "a\nb", "id": 7},
        {"input_ids": [1, 2, 3], "prompt_length": 1},
    )
    assert read(path) == [
        Sample(f"{path}:1", messages=tuple(CHAT)),
        Sample(f"{path}:3", messages=tuple(CHAT)),
        Sample(f"{path}:4", text="a\nb"),
        Sample(f"{path}:5", token_ids=(1, 2, 3), prompt_length=1),
    ]


def test_what_a_template_may_want_travels_with_the_message(tmp_path):
    turn = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    (sample,) = read(write(tmp_path / "a.jsonl", {"messages": [turn]}))
    assert sample.messages == (turn,)


@pytest.mark.parametrize("name", ["a.txt", "a.py", "README"])
def test_any_other_file_is_one_document(tmp_path, name):
    path = tmp_path / name
    path.write_bytes("\ufeffhéllo\r\nyou\n".encode())
    assert read(path) == [Sample(f"{path}:1", text="héllo\r\nyou\n")]


def test_folders_are_walked_in_sorted_order_whatever_the_file_system_says(tmp_path, monkeypatch):
    """Files of a folder before its folders; hidden ones and caches left out."""
    for name in ["b.txt", "a.txt", "z/c.txt", "m/x/d.txt", ".git/e.txt", ".f", "__pycache__/g.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    expected = ["a.txt", "b.txt", "m/x/d.txt", "z/c.txt"]
    scan = os.walk

    def shuffled(*args, **options):
        for folder, folders, names in scan(*args, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", shuffled)
    assert [str(p.relative_to(tmp_path)) for p in data_files([tmp_path])] == expected


def test_paths_keep_the_order_of_the_recipe(tmp_path):
    first, second = write(tmp_path / "z.txt", "1"), write(tmp_path / "a.txt", "2")
    assert [s.text for s in read(first, second)] == ["1\n", "2\n"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": ', "not JSON (Expecting value at column"),
        ("[1]", "not a JSON object"),
        ('{"txt": "a"}', "no 'messages' or 'conversations' or 'text' or 'input_ids' in the record"),
        ('{"text": 3}', "'text' is not a string"),
        ('{"messages": []}', "the conversation is not a list of messages"),
        ('{"messages": "hi"}', "the conversation is not a list of messages"),
        ('{"messages": ["hi"]}', "message 1 is not an object"),
        ('{"messages": [{"role": "bird", "content": "x"}]}', "message 1: role 'bird' is none of"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "message 1: role ['user'] is none"),
        ('{"messages": [{"role": "user"}]}', "message 1: content is not a string"),
        ('{"text": "\\ud83d"}', "half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "half a surrogate pair"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_told_with_its_place_and_does_not_end_the_file(tmp_path, line, what):
    path = write(tmp_path / "a.jsonl", {"text": "one"}, line, {"text": "three"})
    before, bad, after = read(path)
    assert (before.text, after.text) == ("one", "three")
    assert isinstance(bad, BadLine) and bad.where == f"{path}:2"
    assert what in bad.what and "\n" not in str(bad)


def test_bytes_that_are_no_text_are_bad_lines(tmp_path):
    """In JSON lines only the line; else the file, with the line where it went wrong."""
    lines, text, nul = tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "c.bin"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "ok"}\n{"text": "\xff"}\n')
    text.write_bytes(b"one\ntwo \xff\n")
    nul.write_bytes(b"\0\0")
    got = read(lines, text, nul)
    assert got[0] == Sample(f"{lines}:1", text="ok")
    assert [item.where for item in got[1:]] == [f"{lines}:2", f"{text}:2", f"{nul}:1"]
    assert all(isinstance(item, BadLine) for item in got[1:])


def test_a_json_file_is_not_taken_for_plain_text(tmp_path):
    (bad,) = read(write(tmp_path / "a.json", {"text": "x"}))
    assert isinstance(bad, BadLine) and ".jsonl" in bad.what


def test_a_format_refuses_records_of_the_other_kind(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"text": "x"})
    plain = write(tmp_path / "b.txt", "x")
    kinds = {
        format: [type(item) for item in read(path, plain, format=format)]
        for format in ("auto", "chat", "text")
    }
    assert kinds == {
        "auto": [Sample, Sample, Sample],
        "chat": [Sample, BadLine, BadLine],
        "text": [BadLine, Sample, Sample],
    }


@pytest.mark.parametrize("kind", ["missing", "dangling", "folder without permission"])
def test_an_unreadable_path_is_one_line(tmp_path, monkeypatch, kind):
    path = tmp_path / "data"
    if kind == "dangling":
        path.mkdir()
        (path / "link.txt").symlink_to(tmp_path / "nowhere")
    if kind == "folder without permission":  # root may read everything, so the system is asked less
        path.mkdir()
        monkeypatch.setattr(os, "scandir", _refuse)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def _refuse(path):
    raise PermissionError(13, "Permission denied", str(path))
