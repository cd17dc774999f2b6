"""The page of a run: whole, short, resumed, interrupted, crashed; nothing loaded, all escaped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import (
    BEGUN,
    HOSTILE,
    crashed_run,
    end_lines,
    held_out_line,
    train_line,
    whole_run,
    write_crash,
    write_metrics,
)
from typer.testing import CliRunner

from dflash import run_report
from dflash.cli import app
from dflash.run_report import ReportError, read_run, write_run_report

ROOT = Path(__file__).parents[3]


def page(folder):
    return write_run_report(folder).read_text()


def test_a_whole_run_shows_everything(tmp_path):
    text = page(whole_run(tmp_path / "run"))
    for part in (
        "Loss",
        "Acceptance length",
        "bonus included",
        "Accuracy by slot",
        "Throughput",
        "Queue depths",
        "drafter-1",
        "target-0",
        "compile 20.0 %",
        "tau, measured, bonus included",
        "3.250",
        "Tokens committed per pass",
        "eval-torn.json cannot be read",
        "model.safetensors",
        "2.0 KiB",
        "the mean of 3 logged steps",
        "1 values were not finite",
        "complete",
    ):
        assert part in text, part


def test_the_page_loads_nothing_and_what_it_is_given_stays_text(tmp_path):
    folder = whole_run(tmp_path / "run")
    write_crash(folder, BEGUN, reason=HOSTILE)
    text = page(folder)
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert not re.search(r"https?://|@import|url\(|fetch\(|\ssrc=", text)
    assert "default-src 'none'" in text


def test_busy_is_everything_but_waiting():
    assert set(run_report.IDLE) < set(run_report.ACTIVITIES)
    (worker,) = run_report._worker_times(
        [{"worker": "d", "packets": 2, "seconds": {"queue": 3.0, "compute": 4.0, "reduce": 1.0}}]
    )
    assert worker.busy == 0.5 and worker.shares["queue"] == 0.375


def test_a_step_done_again_counts_once_and_the_workers_parts_add_up(tmp_path):
    again = train_line(2, loss=9.0)
    lines = [train_line(1), train_line(2), *end_lines(2, signal=15), again, *end_lines(4)]
    write_metrics(tmp_path, lines)
    run = read_run(tmp_path)
    assert [(line["step"], line["loss"]) for line in run.train] == [(1, 51.0), (2, 9.0)]
    assert {worker.name: worker.packets for worker in run.workers} == {
        "target-0": 6,
        "drafter-0": 6,
    }
    assert run.state == "complete"


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([], "no end recorded: it runs, or was killed"),
        ([train_line(1)], "no end recorded: it runs, or was killed"),
        ([train_line(1), held_out_line(1), *end_lines(1)], "complete"),
        ([train_line(1), *end_lines(1, signal=2)], "ended by signal 2"),
        ([train_line(1), *end_lines(1, signal=2), train_line(2)], "no end recorded"),
        ([{"kind": "train", "step": 1}], "no end recorded"),
    ],
)
def test_few_steps_or_none_render(tmp_path, lines, state):
    write_metrics(tmp_path, lines)
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    assert state in page(tmp_path)


def test_a_crash_stands_on_top(tmp_path):
    text = page(crashed_run(tmp_path / "run"))
    assert text.index("The run failed") < text.index("<h3>Loss")
    assert "drafter-1 died: RuntimeError: x" in text and "in claim" in text
    assert read_run(tmp_path / "run").state == "crashed"


def test_a_crash_that_a_resumed_run_left_behind_is_told_apart(tmp_path):
    write_metrics(tmp_path, [train_line(1), train_line(5), *end_lines(5)])
    write_crash(tmp_path, BEGUN + 3)
    assert "it was resumed" in page(tmp_path)
    assert read_run(tmp_path).state == "complete"


@pytest.mark.parametrize("text", ["{", "[]", '{"workers": [{}]}'])
def test_a_torn_crash_report_does_not_hide_the_run(tmp_path, text):
    folder = crashed_run(tmp_path / "run")
    (folder / "crash" / "report.json").write_text(text)
    assert "The run failed" in page(folder)


def test_the_command_writes_it_and_refuses_what_is_no_run(tmp_path):
    done = CliRunner().invoke(app, ["report", str(crashed_run(tmp_path / "run"))])
    assert done.exit_code == 0 and done.output == f"report in {tmp_path}/run/report.html\n"
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert refused.output.startswith(f"error: {tmp_path}: is not a run")
    assert refused.output.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    folder = crashed_run(tmp_path / "run")
    (folder / "report.html.part").mkdir()
    with pytest.raises(ReportError, match=r"report\.html: cannot be written"):
        write_run_report(folder)


def test_both_pages_look_alike():
    """Neither package may import the other, so the two files are copies: equal ones."""
    for name in ("look.css", "look.js"):
        ours, theirs = (ROOT / where / "templates" / name for where in ("dflash", "harness/report"))
        assert ours.read_bytes() == theirs.read_bytes(), name
