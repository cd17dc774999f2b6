"""The target that ships: it loads, it has learnt something, and its card says how much."""

from __future__ import annotations

import re

import pytest
import torch

from dflash.config import TargetSettings
from dflash.data.stdlib import stdlib_sources
from dflash.target.bits import bits_per_byte
from dflash.target.load import BUNDLED, load_targets

ALLOWED = 2.0  # bits per byte on all held-out files


@pytest.fixture(scope="module")
def target():
    return load_targets(TargetSettings(path="bundled", dtype="float32"), [torch.device("cpu")])


@pytest.fixture(scope="module")
def files():
    """The smallest held-out files; all of them would take minutes."""
    held_out = sorted(stdlib_sources().held_out, key=lambda path: (path.stat().st_size, path))
    return [path for path in held_out if path.stat().st_size > 500][:6]


def test_the_card_states_bits_per_byte_within_what_is_allowed():
    card = (BUNDLED / "README.md").read_text()
    stated = re.search(r"\| held-out bits per byte \| \*\*([\d.]+)\*\* \((\d+) files", card)
    assert stated is not None
    assert float(stated[1]) <= ALLOWED
    assert len((BUNDLED / "held-out.txt").read_text().splitlines()) == int(stated[2])
    assert "dflash make-tiny-target FOLDER --steps" in card


def test_it_predicts_text_that_it_has_not_seen_and_a_random_one_does_not(target, files):
    assert len(files) == 6
    learnt = bits_per_byte(target.model, files, target.tokenizer)
    torch.manual_seed(0)
    random = type(target.model)(target.config).eval()
    assert learnt < 3 < 7 < bits_per_byte(random, files, target.tokenizer)
