"""Row sets: packet numbers name rows for ever, and the report says what the data were."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import DataSettings
from dflash.data import DataError, RowSet, build_rows


def order(rows, numbers):
    return [rows.packet(number)[1] for number in numbers]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**40), st.integers(0, 200), st.booleans())
def test_every_epoch_uses_every_row_once_and_resumes_anywhere(size, seed, start, shuffle):
    """A set made anew and asked from the middle on gives what the first would have given."""
    rows = RowSet(range(size), seed, shuffle)
    straight = [rows.packet(number) for number in range(start + 2 * size)]
    for epoch in range((start + 2 * size) // size):
        packets = straight[epoch * size : (epoch + 1) * size]
        assert {e for e, _ in packets} == {epoch}
        assert sorted(row for _, row in packets) == list(range(size))
    again = RowSet(range(size), seed, shuffle)
    resumed = [again.packet(number) for number in reversed(range(start, start + 2 * size))]
    assert resumed[::-1] == straight[start:]
    assert len(rows) == rows.packets_per_epoch == size


def test_the_order_changes_with_epoch_and_seed_and_touches_no_global_generator():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    rows, other = RowSet(range(50), 0), RowSet(range(50), 1)
    orders = [order(rows, range(50)), order(rows, range(50, 100)), order(other, range(50))]
    assert len({tuple(o) for o in [*orders, range(50)]}) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_without_shuffling_rows_come_in_order():
    assert order(RowSet(range(3), 0, shuffle=False), range(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_packets_before_the_first_and_sets_without_rows_are_refused():
    with pytest.raises(IndexError, match="packet -1"):
        RowSet(range(3), 0).packet(-1)
    with pytest.raises(DataError, match=r"data\.train"):
        RowSet([], 0)


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


@pytest.fixture
def folder(tmp_path):
    """Two good chats, two bad lines, a text, a text too long for a row, an empty file."""
    lines = [json.dumps(CHAT), "{", json.dumps(CHAT), '{"text": 1}']
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    (tmp_path / "poem.txt").write_text("abcdefg")
    (tmp_path / "long.md").write_text("x" * 100)
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def make_settings(folder, **change):
    return DataSettings(**{"train": (str(folder),), "row_length": 48, **change})


def test_files_become_rows_and_a_report(folder, make_tokenizer):
    rows, report = build_rows(make_settings(folder), make_tokenizer(), seed=0)
    assert report.bad_lines == 2
    assert [bad.where for bad in report.first_bad] == [
        f"{folder / 'chat.jsonl'}:2",
        f"{folder / 'chat.jsonl'}:4",
    ]
    # Chats of 25 tokens (3 learnt), 100 x and EOS as 48 + 48 + 5, 7 letters and EOS, one EOS.
    n = report.packed
    assert (n.documents, n.tokens, n.supervised) == (5, 159, 115)
    assert (n.split, n.dropped, n.pieces, n.rows) == (1, 1, 6, len(rows))
    assert report.fill == 159 / (48 * len(rows))
    assert sum(int((row.document_ids >= 0).sum()) for row in rows.rows) == n.tokens
    assert str(report).splitlines() == [
        f"{folder}: 5 documents, 159 tokens, 115 supervised (72.3%)",
        "4 rows of 48 tokens, 82.8% filled, 1.5 documents a row",
        "documents longer than a row, cut into pieces: 1",
        "dropped, having no two supervised tokens side by side: 1 documents (1 pieces in all)",
        "bad lines skipped: 2",
        f"  {folder / 'chat.jsonl'}:2: not JSON (Expecting property name enclosed in double quotes"
        " at column 2)",
        f"  {folder / 'chat.jsonl'}:4: 'text' is not a string",
    ]


def test_the_report_names_the_first_bad_lines_and_counts_all(tmp_path, make_tokenizer):
    (tmp_path / "a.jsonl").write_text("{\n" * 5 + '{"text": "good"}')
    _, report = build_rows(make_settings(tmp_path), make_tokenizer(), seed=0, bad_lines_shown=2)
    assert report.bad_lines == 5 and len(report.first_bad) == 2
    assert report.lines()[-1] == "  and 3 more"


def test_a_bad_line_is_fatal_where_the_recipe_says_so(folder, make_tokenizer):
    with pytest.raises(DataError) as caught:
        build_rows(make_settings(folder, on_bad_line="fail"), make_tokenizer(), seed=0)
    said = str(caught.value)
    assert said.startswith(f"{folder / 'chat.jsonl'}:2: not JSON")
    assert said.endswith("correct it or set data.on_bad_line=skip") and "\n" not in said


def test_a_conversation_that_the_template_refuses_counts_as_a_bad_line(folder, make_tokenizer):
    odd = {"messages": CHAT["messages"][::-1]}
    (folder / "odd.jsonl").write_text(json.dumps(odd))
    _, report = build_rows(make_settings(folder), make_tokenizer("strict"), seed=0)
    assert report.bad_lines == 3
    assert report.first_bad[-1].where == f"{folder / 'odd.jsonl'}:1"


@pytest.mark.parametrize(
    ("content", "change", "said"),
    [
        (None, {}, "no document at all"),
        ("\n\n", {}, "no document at all"),
        ('{"text": ""}', {}, "no two supervised tokens side by side in any of 1 documents"),
        ("{", {}, "bad lines: 1, the first "),
        ('{"text": "good"}', {"format": "chat"}, "a.jsonl:1: no 'messages' or 'conversations'"),
    ],
)
def test_nothing_to_train_on_is_one_line(tmp_path, make_tokenizer, content, change, said):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError) as caught:
        build_rows(make_settings(tmp_path, **change), make_tokenizer(), seed=0)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}: nothing to train on")


def test_settings_reach_the_rows(folder, make_tokenizer):
    """supervise, max_document_tokens, shuffle; held-out paths in the place of the training ones."""
    tokenizer = make_tokenizer()
    _, report = build_rows(make_settings(folder, supervise="all"), tokenizer, seed=0)
    assert report.packed.supervised == report.packed.tokens
    _, report = build_rows(make_settings(folder, max_document_tokens=30), tokenizer, seed=0)
    assert report.packed.truncated == 1 and report.packed.split == 0
    rows, _ = build_rows(make_settings(folder, shuffle=False), tokenizer, seed=0)
    assert [row.index for row in order(rows, range(4))] == [0, 1, 2, 3]
    settings = make_settings(folder)
    rows, report = build_rows(
        settings, tokenizer, seed=0, paths=[folder / "poem.txt"], shuffle=False
    )
    assert (len(rows), report.packed.tokens, rows.shuffle) == (1, 8, False)


def test_padding_uses_a_token_that_exists(folder, make_tokenizer):
    """The tokenizer's own, else EOS, else 0."""
    padded = make_tokenizer()
    padded.pad_token = "<|im_start|>"
    for tokenizer, expected in [(padded, 257), (make_tokenizer(), 256)]:
        rows, _ = build_rows(
            make_settings(folder, train=(str(folder / "poem.txt"),)), tokenizer, seed=0
        )
        assert rows.rows[0].input_ids[-1] == expected


def test_packets_are_the_same_in_another_process(folder, tmp_path):
    """Whatever PYTHONHASHSEED: resume happens in another process."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from conftest import make_tokenizer;"
        "from dflash.config import DataSettings; from dflash.data import build_rows;"
        "s = DataSettings(train=(sys.argv[1],), row_length=16);"
        "rows, _ = build_rows(s, make_tokenizer(), seed=5);"
        "print([rows.packet(n)[1].index for n in range(40)]);"
        "print([rows.packet(n)[1].input_ids.tolist() for n in range(40)])"
    )
    said = []
    for seed in ("0", "77"):
        out = subprocess.run(
            [sys.executable, "-c", code, str(folder), __file__.rpartition("/")[0]],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        said.append(out.stdout)
    assert said[0] == said[1]
    indices = json.loads(said[0].splitlines()[0])
    assert indices[:5] != sorted(indices[:5]) or indices[5:10] != sorted(indices[5:10])
