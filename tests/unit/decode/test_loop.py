"""Greedy speculative decoding is the target's own greedy text, whatever is proposed."""

import pytest
import torch
from tiny_models import Oracle, make_drafter, make_target
from torch import nn

from dflash.decode import (
    BlockProposer,
    DecodeError,
    TargetSession,
    plain_decode,
    speculative_decode,
)
from dflash.target import capture_features

PROMPTS = [[3, 1, 4, 1, 5], [9], list(range(20))]


def by_definition(target, prompt, count):
    """Greedy text without any cache: the whole text through the target for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def consistent(stats, block, budget_cut=True):
    """What must hold of the counts of every decode."""
    total = sum(c * n for c, n in enumerate(stats.committed, start=1))
    assert stats.tokens == stats.prompts + total
    assert stats.passes == sum(stats.committed)
    assert len(stats.committed) == block and len(stats.proposed) == len(stats.accepted) == block - 1
    assert all(a <= p <= stats.passes for a, p in zip(stats.accepted, stats.proposed, strict=True))
    assert list(stats.accepted) == sorted(stats.accepted, reverse=True)
    if stats.passes:
        assert stats.tau == pytest.approx(total / stats.passes)
    # A pass commits what it accepted and the bonus, unless something cut it.
    assert total <= sum(stats.accepted) + stats.passes


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_decoding_with_the_cache_is_greedy_by_definition(target, prompt):
    decoded = plain_decode(target, prompt, max_new_tokens=12)
    assert decoded.tokens == by_definition(target, prompt, 12)
    assert len(set(decoded.tokens)) > 3  # a target that repeats itself would prove little
    assert decoded.stats.committed == (11,) and decoded.stats.tau == 1.0 and not decoded.stopped


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_random_drafter_changes_nothing(dtype, rule, block):
    target = make_target(dtype=dtype)
    drafter = make_drafter(target, block)
    for prompt in PROMPTS:
        plain = plain_decode(target, prompt, max_new_tokens=30)
        fast = speculative_decode(target, drafter, prompt, max_new_tokens=30, rule=rule)
        assert fast.tokens == plain.tokens
        consistent(fast.stats, block)


@pytest.mark.parametrize(("wrong", "run"), [((), 4), ((1,), 0), ((3,), 2), ((2, 4), 1)])
def test_known_drafts_commit_what_they_must(target, wrong, run):
    """Always right: B tokens a pass; wrong in slot 1: one. The features are the context's."""
    prompt = PROMPTS[0]
    output = by_definition(target, prompt, 40)
    text = prompt + output
    features = capture_features(target, torch.tensor([text]), Oracle.target_layer_ids)
    oracle = Oracle(text, len(prompt), wrong=wrong, features=features)
    count = 1 + 5 * (run + 1)  # ends with a whole block, were the budget not there
    decoded = speculative_decode(target, oracle, prompt, max_new_tokens=count)
    assert decoded.tokens == output[:count]
    assert decoded.stats.committed == tuple(5 * (c == run + 1) for c in range(1, 6))
    assert decoded.stats.tau == run + 1
    assert decoded.stats.accepted[:run] == (5,) * run
    assert sum(decoded.stats.accepted[run:]) == 0
    consistent(decoded.stats, 5)


@pytest.mark.parametrize("budget", range(1, 13))
def test_the_budget_is_met_exactly_and_the_last_block_is_shorter(target, budget):
    prompt = PROMPTS[0]
    text = prompt + by_definition(target, prompt, 20)
    decoded = speculative_decode(target, Oracle(text, len(prompt)), prompt, max_new_tokens=budget)
    assert decoded.tokens == text[len(prompt) :][:budget]
    whole, rest = divmod(budget - 1, 5)
    expected = [0] * 5
    expected[4] = whole
    if rest:
        expected[rest - 1] += 1
    assert decoded.stats.committed == tuple(expected)
    consistent(decoded.stats, 5)


@pytest.mark.parametrize("wrong", [(), (1,), (3,)])
def test_a_stop_token_anywhere_in_a_block_ends_the_text_there(target, wrong):
    prompt = PROMPTS[0]
    output = by_definition(target, prompt, 20)
    for stop in sorted(set(output)):
        first = output.index(stop)
        oracle = Oracle(prompt + output, len(prompt), wrong=wrong)
        decoded = speculative_decode(
            target, oracle, prompt, max_new_tokens=20, stop_token_ids=[stop, 10_000]
        )
        assert decoded.tokens == output[: first + 1] and decoded.stopped
        plain = plain_decode(target, prompt, max_new_tokens=20, stop_token_ids=[stop])
        assert plain.tokens == decoded.tokens and plain.stopped
        consistent(decoded.stats, 5)


def test_a_cropped_cache_goes_on_as_if_nothing_had_been_there(target):
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    straight = TargetSession(target, (1,))
    expected, features = straight.run(tokens, keep=8)
    session = TargetSession(target, (1,))
    session.run(tokens[:, :3], keep=1)
    session.run(torch.tensor([[7, 7, 7, 7]]), keep=4)
    session.crop(3)
    logits, part = session.run(tokens[:, 3:], keep=5)
    torch.testing.assert_close(logits, expected[3:], rtol=0, atol=1e-12)
    torch.testing.assert_close(part, features[:, 3:], rtol=0, atol=1e-12)
    session.crop(8)
    assert session.length == 8


def test_a_target_that_cannot_be_rolled_back_is_refused(target):
    session = TargetSession(target)
    session.run(torch.tensor([[1, 2, 3]]), keep=1)
    session._cache = type("Recurrent", (), {"is_croppable": False})()
    with pytest.raises(DecodeError, match="cannot be rolled back"):
        session.crop(2)


def test_two_texts_do_not_mix(target, drafter):
    proposer = BlockProposer(drafter, target)
    first = speculative_decode(target, proposer, PROMPTS[0], max_new_tokens=9)
    speculative_decode(target, proposer, PROMPTS[2], max_new_tokens=9)
    again = speculative_decode(target, proposer, PROMPTS[0], max_new_tokens=9)
    assert first.tokens == again.tokens and first.stats.committed == again.stats.committed


def test_stats_of_prompts_add_up(target, drafter):
    runs = [speculative_decode(target, drafter, p, max_new_tokens=9).stats for p in PROMPTS]
    total = runs[0] + runs[1] + runs[2]
    assert total.prompts == 3 and total.tokens == 27 and total.prompt_tokens == 26
    consistent(total, 5)
    with pytest.raises(ValueError, match="do not add up"):
        total + plain_decode(target, [1], max_new_tokens=1).stats


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"rule": "hope"}, "unknown acceptance rule 'hope': one of match, rejection"),
    ],
)
def test_what_cannot_be_decoded_is_one_line(target, drafter, change, said):
    arguments = {"prompt_ids": [1], "max_new_tokens": 2} | change
    with pytest.raises(DecodeError, match=said):
        speculative_decode(target, drafter, **arguments)


def test_a_drafter_of_another_width_is_refused(target, drafter):
    other = make_target()
    other.set_input_embeddings(nn.Embedding(41, 48))
    with pytest.raises(DecodeError, match="do not fit"):
        speculative_decode(other, drafter, [1], max_new_tokens=2)
