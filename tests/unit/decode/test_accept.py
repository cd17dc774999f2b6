"""Sampled text has the target's own distribution, by both rules: chi-square with fixed seeds."""

import itertools

import pytest
import torch
from tiny_models import make_drafter, make_target

from dflash.decode import RULES, plain_decode, speculative_decode
from dflash.decode.accept import accept_rejection, longest_match, probabilities

# Upper 0.1 % points of chi-square; the seeds are fixed, so a pass stays a pass.
CRITICAL = {2: 13.8, 26: 54.1}


def chi_square(counts, expected):
    assert expected.min() > 4, "too few draws for the smallest cell"
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.fixture(scope="module")
def tiny():
    target = make_target(vocabulary=3, spread=0.15, seed=1)
    return target, make_drafter(target, block_size=4, seed=5)


def path_probabilities(target, prompt, length, temperature):
    """p(text) of every text of `length` tokens, by the chain rule."""
    vocabulary = target.config.vocab_size
    paths = list(itertools.product(range(vocabulary), repeat=length))
    rows = torch.tensor([[*prompt, *path] for path in paths])
    log_p = torch.log_softmax(target(rows).logits / temperature, -1)
    total = torch.zeros(len(paths), dtype=log_p.dtype)
    for at in range(length):
        place = len(prompt) + at
        total += log_p[:, place - 1].gather(1, rows[:, place, None])[:, 0]
    return total.exp()


@pytest.mark.parametrize("rule", ["match", "rejection", None])
def test_the_sampled_text_has_the_targets_distribution(tiny, rule):
    """The first three tokens of four, together: prefill's and a block's (None: plain decoding)."""
    target, drafter = tiny
    generator = torch.Generator().manual_seed(11)
    prompt, draws = [1, 0, 2], 900
    expected = path_probabilities(target, prompt, 3, 1.0)
    assert expected.sum() == pytest.approx(1.0)
    counts = torch.zeros(27, dtype=torch.float64)
    kept, offered = 0, 0
    for _ in range(draws):
        settings = {"max_new_tokens": 4, "temperature": 1.0, "generator": generator}
        if rule is None:
            decoded = plain_decode(target, prompt, **settings)
        else:
            decoded = speculative_decode(target, drafter, prompt, rule=rule, **settings)
            kept += sum(decoded.stats.accepted)
            offered += sum(decoded.stats.proposed)
        a, b, c = decoded.tokens[:3]
        counts[9 * a + 3 * b + c] += 1
    assert rule is None or 0.1 < kept / offered < 0.9  # both outcomes were there to be judged
    assert chi_square(counts, draws * expected) < CRITICAL[26]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_the_first_two_committed_tokens_are_the_targets(rule):
    """The rule alone, on fixed p and q that disagree: many draws of one block of two drafts."""
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.5, 0.1]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    first, second = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(4000):
        drafts, held = RULES[rule].draft(q.log(), 1.0, generator)
        kept, bonus = RULES[rule].verify(drafts, held, p.log(), 1.0, generator)
        new = [*drafts[:kept].tolist(), bonus]
        first[new[0]] += 1
        if len(new) > 1:  # here p does not depend on the first token
            second[new[1]] += 1
    assert chi_square(first, 4000 * p[0]) < CRITICAL[2]
    assert chi_square(second, second.sum() * p[1]) < CRITICAL[2]


def test_the_share_accepted_by_rejection_is_the_overlap():
    """P(accept) = sum min(p, q): Leviathan et al., arXiv 2211.17192, theorem 3.5."""
    p = torch.tensor([[0.6, 0.3, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    draws, kept = 4000, 0
    for _ in range(draws):
        draft = torch.multinomial(q, 1, generator=generator)[:, 0]
        kept += accept_rejection(draft, q, p, generator)[0]
    overlap = float(torch.minimum(p[:1], q).sum())
    assert abs(kept / draws - overlap) < 4 * (overlap * (1 - overlap) / draws) ** 0.5


def test_equal_distributions_accept_everything():
    p = torch.softmax(torch.randn(4, 7, generator=torch.Generator().manual_seed(0)), -1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        drafts = torch.multinomial(p[:3], 1, generator=generator)[:, 0]
        assert accept_rejection(drafts, p[:3], p, generator)[0] == 3


def test_a_draft_that_the_target_never_says_is_never_kept():
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.tensor([[1.0, 0.0]])
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        assert accept_rejection(torch.tensor([0]), q, p, generator) == (0, 1)


@pytest.mark.parametrize(
    ("drafts", "own", "expected"),
    [([], [5], (0, 5)), ([1, 2], [1, 2, 3], (2, 3)), ([1, 2], [1, 9, 3], (1, 9)),
     ([1, 2], [0, 2, 3], (0, 0))],
)  # fmt: skip
def test_the_longest_match_and_what_follows(drafts, own, expected):
    drafts = torch.tensor(drafts, dtype=torch.int64)
    assert longest_match(drafts, torch.tensor(own)) == expected


@pytest.mark.parametrize("rule", list(RULES))
def test_without_drafts_a_rule_samples_from_the_target(rule):
    """The token from prefill, and the last one of a budget."""
    none, generator = torch.empty(0, dtype=torch.int64), torch.Generator().manual_seed(2)
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    counts = torch.zeros(3, dtype=torch.float64)
    for _ in range(1000):
        kept, token = RULES[rule].verify(none, None, p.log(), 1.0, generator)
        assert kept == 0
        counts[token] += 1
    assert chi_square(counts, 1000 * p[0]) < CRITICAL[2]
    assert RULES[rule].verify(none, None, p.log(), 0.0, generator) == (0, 0)


@pytest.mark.parametrize("rule", list(RULES))
def test_one_seed_gives_one_text(tiny, rule):
    target, drafter = tiny
    texts = [
        speculative_decode(
            target, drafter, [1], max_new_tokens=12, temperature=1.0, rule=rule,
            generator=torch.Generator().manual_seed(8),
        ).tokens
        for _ in range(2)
    ]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300])
def test_a_temperature_next_to_zero_is_greedy_and_not_a_number_is_nowhere(temperature):
    logits = torch.tensor([[30.0, 60.0, -5.0], [0.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
    assert torch.equal(probabilities(logits, temperature), expected)
    each = torch.full((2, 1), temperature)
    assert torch.equal(probabilities(logits, each), expected)
