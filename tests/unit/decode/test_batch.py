"""Decoding in batches gives each prompt what it would get alone."""

import torch
from tiny_models import make_target

from dflash.decode import plain_decode
from dflash.decode.batch import continue_batch

PROMPTS = [[3, 1, 4, 1, 5], [9], list(range(20))]


def test_greedy_rows_of_a_padded_batch_equal_plain_decoding(target):
    rows = continue_batch(target, PROMPTS, max_new_tokens=12, temperatures=[0.0, 0.0, 0.0], seed=0)
    assert rows == [plain_decode(target, p, max_new_tokens=12).tokens for p in PROMPTS]


def test_a_row_ends_with_its_stop_token_and_the_others_go_on(target):
    alone = [plain_decode(target, p, max_new_tokens=12).tokens for p in PROMPTS]
    stop = alone[0][3]
    expected = [
        plain_decode(target, p, max_new_tokens=12, stop_token_ids=(stop,)).tokens for p in PROMPTS
    ]
    rows = continue_batch(
        target, PROMPTS, max_new_tokens=12, temperatures=[0.0] * 3, stop_token_ids=(stop,), seed=0
    )
    assert rows == expected and len({len(row) for row in rows}) > 1


def test_samples_follow_the_targets_distribution_and_the_seed():
    """One token after one prompt, 4,000 times: the frequencies are softmax(logits / T)."""
    target = make_target(vocabulary=7, spread=0.3)
    prompts = [[1, 2, 3]] * 4000
    settings = {"max_new_tokens": 1, "temperatures": [0.7] * 4000}
    rows = continue_batch(target, prompts, seed=1, **settings)
    assert rows == continue_batch(target, prompts, seed=1, **settings)
    assert rows != continue_batch(target, prompts, seed=2, **settings)
    counts = torch.bincount(torch.tensor(rows)[:, 0], minlength=7) / 4000
    expected = torch.softmax(target(torch.tensor([[1, 2, 3]])).logits[0, -1] / 0.7, -1)
    torch.testing.assert_close(counts.double(), expected, atol=0.03, rtol=0)


def test_temperatures_are_each_rows_own(target):
    greedy = plain_decode(target, PROMPTS[0], max_new_tokens=20).tokens
    rows = continue_batch(
        target, [PROMPTS[0]] * 2, max_new_tokens=20, temperatures=[0.0, 2.0], seed=3
    )
    assert rows[0] == greedy and rows[1] != greedy


def test_it_stops_when_told(target):
    answers = iter([True, True, False])
    rows = continue_batch(
        target, PROMPTS, max_new_tokens=9, temperatures=[0.0] * 3, seed=0,
        go_on=lambda: next(answers),
    )  # fmt: skip
    assert [len(row) for row in rows] == [2, 2, 2]
