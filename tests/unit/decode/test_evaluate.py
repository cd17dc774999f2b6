"""The report: measured and simulated acceptance agree where they must."""

import json

import pytest
import torch
from tiny_models import make_drafter, make_target

from dflash.decode import speculative_decode
from dflash.evaluate import evaluate, simulate_acceptance

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]


@pytest.fixture(scope="module")
def easy():
    """A target of two tokens: a random drafter is often right."""
    target = make_target(vocabulary=2, spread=0.5)
    return target, make_drafter(target, block_size=6)


def some_prompts(vocabulary):
    return [[token % vocabulary for token in prompt] for prompt in PROMPTS]


def test_simulation_at_block_starts_is_the_measured_tau(easy):
    """Two independent paths: one cached pass a block, or one masked pass over the whole text."""
    target, drafter = easy
    report = evaluate(target, drafter, some_prompts(2), max_new_tokens=40)
    s = report.speculative
    assert 1.0 < s.tau < 6.0
    assert report.simulated.boundary_blocks == s.passes
    assert report.simulated.at_boundaries == pytest.approx(s.tau, abs=1e-12)
    assert report.simulated.every_blocks == sum(39 for _ in PROMPTS)
    assert report.identical == 3
    assert sum(s.committed) == s.passes and s.tokens == report.plain.tokens == 120


def test_simulation_counts_a_stop_token_as_the_end(easy):
    target, drafter = easy
    prompt = some_prompts(2)[1]
    for stop in (0, 1):
        decoded = speculative_decode(
            target, drafter, prompt, max_new_tokens=40, stop_token_ids=[stop]
        )
        simulated = simulate_acceptance(target, drafter, prompt, decoded.tokens)
        assert simulated.boundary_blocks == decoded.stats.passes
        assert simulated.boundary_committed == len(decoded.tokens) - 1


def test_an_output_of_one_token_has_no_blocks(easy):
    target, drafter = easy
    assert simulate_acceptance(target, drafter, [1, 0], [1]).every_blocks == 0


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "match"), (1.0, "rejection")])
def test_the_report_reads_and_survives_json(easy, temperature, rule):
    target, drafter = easy
    report = evaluate(
        target, drafter, some_prompts(2), max_new_tokens=12, temperature=temperature, rule=rule
    )
    text = "\n".join(report.lines())
    assert "bonus included" in text and f"{report.speculative.tau:.3f}" in text
    assert ("identical to plain greedy: 3 of 3" in text) == (temperature == 0)
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert read["bonus_included"] is True and len(read["slot_rates"]) == 5
    assert read["sums"]["speculative"]["committed"] == list(report.speculative.committed)
    assert read["speedup"] > 0
    assert report.card_metrics()["prompts"] == "3"


def test_one_new_token_needs_no_pass_and_the_report_still_reads(easy):
    target, drafter = easy
    report = evaluate(target, drafter, [[1]], max_new_tokens=1)
    assert report.to_json()["tau"] is None
    assert report.lines()


def test_no_prompts_is_refused(easy):
    with pytest.raises(ValueError, match="no prompts"):
        evaluate(*easy, [], max_new_tokens=3)


def test_one_seed_gives_one_report(easy):
    target, drafter = easy
    runs = [
        evaluate(target, drafter, some_prompts(2), max_new_tokens=12, temperature=1.0, seed=4)
        for _ in range(2)
    ]
    assert runs[0].speculative.committed == runs[1].speculative.committed
    assert torch.equal(*(torch.tensor(run.plain.committed) for run in runs))
