"""The import-time race of ``torch._dynamo`` and ``torch._inductor``, forced in a cold process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import import_case

from harness.isolate import Isolation
from harness.verdict import Verdict, findings, judge

MEASURED = version("torch").startswith("2.13.")


@pytest.fixture(scope="module")
def cold() -> Iterator[Isolation]:
    """A server that has imported torch, and nothing of its compile stack."""
    with Isolation(preload=("torch",)) as opened:
        yield opened


def run(cold: Isolation, **arguments: object) -> dict:
    result = cold.run(import_case.touch, arguments, deadline=200, label="imports")
    assert result.ended == "returned", result.error or result.what
    return result.record()


@pytest.mark.skipif(not MEASURED, reason="which module is in which is measured on 2.13 only")
def test_two_first_imports_that_cross_kill_torch_compile_for_the_process(cold):
    record = run(cold, overlap=True, before="torch")
    assert record["script"]["missed"] is None
    assert judge(record) is Verdict.RAISED
    # Who is given half a module depends on who waits first; both fail either way.
    types = {outcome["error"]["type"].rpartition(".")[2] for outcome in record["outcomes"]}
    assert types <= {"ImportError", "KeyError", "AttributeError", "_DeadlockError"}, types
    assert any("another thread was importing" in finding.what for finding in findings(record))
    assert record["later"].startswith(("ImportError", "AttributeError")), record["later"]


def test_one_after_the_other_they_are_clean(cold):
    record = run(cold, overlap=False, before="torch")
    assert judge(record) is Verdict.COMPLETED and record["later"] == ""


def test_nothing_is_cold_once_the_main_thread_has_imported_it(cold):
    """The remedy, and what importing the trainer's guard does."""
    record = run(cold, overlap=False, before="dflash.compile")
    assert judge(record) is Verdict.COMPLETED
    assert record["touched"] == [import_case.FIRST, import_case.SECOND]
