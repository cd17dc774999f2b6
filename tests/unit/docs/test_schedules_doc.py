"""docs/schedules.md: its program is searched, its schedule forces, its places exist."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from harness import Control, Follow, Schedule, Trial, places

TEXT = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)
    return [block for name, block in fenced if name == language]


def test_the_example_finds_the_race(tmp_path: Path) -> None:
    (example,) = (block for block in blocks("python") if "explore(" in block)
    script = tmp_path / "two_traces.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("found: schedule ")
    if version("torch").startswith("2.13."):  # what the text says of it
        (said,) = re.findall(r"`(found: schedule[^`]*)`", " ".join(TEXT.split()))
        begin, end = said.split("...")
        assert done.stdout.startswith(begin) and done.stdout.splitlines()[0].endswith(end)
    found = Schedule.parse(done.stdout.partition("\n")[2])
    assert found.facts["verdict"] in ("raised", "sticky state") and found.switches <= 3


def test_the_schedule_is_one_and_fits_a_trial() -> None:
    (text,) = (block for block in blocks("") if block.startswith("schedule v1"))
    schedule = Schedule.parse(text)
    assert schedule.switches == 3
    (line,) = (block for block in blocks("python") if "Trial(control=" in block)
    names = {
        "Trial": Trial,
        "Control": Control,
        "Follow": Follow,
        "Schedule": Schedule,
        "text": text,
    }
    assert isinstance(eval(line, names), Trial)


def test_the_places_exist_on_this_torch() -> None:
    (block,) = (block for block in blocks("") if "@entry" in block)
    places.resolve(places.Place.parse(line) for line in block.splitlines())
