"""Import-time races: what is touched must be cold, and the threads must really meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import controls
import pytest

from harness.first_touch import TORCH_TOUCHES, first_touch
from harness.isolate import Isolation
from harness.verdict import Verdict, findings, judge


@pytest.fixture(scope="module")
def cold() -> Any:
    """A server that has imported nothing: its cases are the first to touch torch."""
    with Isolation(preload=()) as opened:
        yield opened


def test_two_threads_that_import_each_other_s_modules_are_caught(
    cold: Isolation, tmp_path: Path
) -> None:
    result = cold.run(controls.half_imported, {"folder": str(tmp_path)}, deadline=100)
    record = result.record()
    assert judge(record) is Verdict.RAISED, result.error
    assert any("another thread was importing" in finding.what for finding in findings(record))


def test_modules_that_do_not_import_each_other_are_clean(cold: Isolation, tmp_path: Path) -> None:
    """The true negative: the same threads, modules without a circle."""
    record = cold.run(without_circle, {"folder": str(tmp_path)}, deadline=100).record()
    assert judge(record) is Verdict.COMPLETED
    assert [outcome["thread"] for outcome in record["outcomes"]] == ["toucher-0", "toucher-1"]


def without_circle(*, folder: str) -> dict[str, Any]:
    import sys

    for name in ("one", "two"):
        Path(folder, f"race_{name}.py").write_text("X = 1\n")
    sys.path.insert(0, folder)
    return first_touch(
        before="", touches=["race_one", "race_two"], threads=2, deadline=30, canaries=False
    )


def test_what_is_imported_already_is_refused() -> None:
    with pytest.raises(ValueError, match="pathlib: imported already, so nobody touches it first"):
        first_touch(before="", touches=["pathlib"], canaries=False)


def touch_torch() -> dict[str, Any]:
    """Runs in a cold process."""
    return first_touch(threads=3)


def test_torch_s_lazy_modules_can_be_touched_first_by_three_threads(cold: Isolation) -> None:
    """The installed torch, as a program meets it that compiles in its threads only."""
    result = cold.run(touch_torch, deadline=250)
    assert result.ended == "returned", result.error
    record = result.record()
    assert judge(record) is Verdict.COMPLETED, [str(finding) for finding in findings(record)]
    assert {"torch._dynamo", "torch._inductor.compile_fx"} <= set(record["touched"])
    assert set(record["touched"]) <= set(TORCH_TOUCHES)
    assert list(record["canaries"]) == ["eager-linear", "fresh-compile"]
