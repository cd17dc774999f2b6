"""Random and mutated logs, for a moment; `nox -s fuzz` does it for ten minutes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.triage import triage_text

sys.path.insert(0, str(Path(__file__).parent))
import fuzz

TEXTS = fuzz.material()


def test_mutated_logs_of_a_hundred_seeds():
    done, wrong = fuzz.run(60.0, first=0, count=100)
    assert done and not wrong, wrong[0]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text(text):
    fuzz.read(text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*fuzz._PIECES, *"ab \n"]), max_size=60).map("".join))
def test_any_sequence_of_pieces(text):
    fuzz.read(text)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 4000), st.integers(0, 4000))
def test_a_log_cut_at_both_ends(text, begin, end):
    fuzz.read(text[begin : len(text) - end])


@pytest.mark.parametrize("piece", [*fuzz._PIECES, "Error: ", "a.", "1: ", "\x1b[", "| ", '" line '])
def test_a_piece_repeated_is_read_in_linear_time(piece):
    assert fuzz.superlinear(piece) is None


def test_different_failures_are_read_in_linear_time():
    def text(count):
        return "".join(
            f'Traceback (most recent call last):\n  File "/a.py", line {n}, in f\n    g()\n'
            f"RuntimeError: Detected that you are using FX to symbolically trace {n}\n"
            for n in range(count)
        )

    short, long = fuzz.seconds(text(200)), fuzz.seconds(text(800))
    assert long < fuzz.TIMES * max(short, 0.02)


def test_the_check_of_time_can_fail(monkeypatch):
    """Negative control: a reading that is quadratic is reported."""

    def quadratic(text):
        n = len(text) // 400
        sum(1 for _ in range(n) for _ in range(n * 40))

    monkeypatch.setattr(fuzz, "triage_text", quadratic)
    assert fuzz.superlinear("x") is not None


def test_the_check_of_crashes_can_fail(monkeypatch):
    def broken(text):
        raise IndexError("planted")

    monkeypatch.setattr(fuzz, "triage_text", broken)
    done, wrong = fuzz.run(10.0, count=3)
    assert done == 3 and len(wrong) == 3 and "planted" in wrong[0]


def test_many_different_failures_are_bounded():
    text = "".join(f"{'abcdefgh'[n % 8] * (n // 8 + 1)}Error: x\n" for n in range(4000))
    diagnosis = triage_text("".join(f"E{line}" for line in text.splitlines(keepends=True)))
    assert len(diagnosis.failures) <= 2001 and diagnosis.overflow > 0
