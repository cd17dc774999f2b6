"""The crash folder: whole or absent, without secrets, and never in the way of the real error."""

from __future__ import annotations

import json

import pytest
from failures import content, failure

from harness import crash


def test_the_folder_has_all_five_files_and_they_can_be_read(tmp_path):
    assert crash.write_folder(tmp_path / "new" / "one", content(), timeline={"events": []}) is None
    folder = tmp_path / "new" / "one"
    assert sorted(path.name for path in folder.iterdir()) == sorted(crash.FILES)
    for path in folder.glob("*.json"):
        assert json.loads(path.read_text())["schema"] == crash.SCHEMA
    assert "harness explain" in (folder / "README.txt").read_text()


def test_the_holders_stack_stands_beside_the_victims(tmp_path):
    crash.write_folder(tmp_path, content(), timeline={})
    text = (tmp_path / "stacks.txt").read_text()
    victim, holder = text.index("== drafter-1"), text.index("-- fx-tracing-flag held by drafter-0")
    assert victim < holder < text.index("_symbolic_trace.py")
    assert "raise RuntimeError(message)" in text[victim:holder]


def test_no_secret_reaches_any_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-1")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "very-secret-2")
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    monkeypatch.setenv("TORCHINDUCTOR_REMOTE", "redis://me:very-secret-4@host")
    argv = ["train.py", "--token", "very-secret-3", "--lr", "1"]
    message = "cannot reach host with very-secret-1 and very-secret-3"
    told = content(failures=[failure(message)], facts={"very": ["very-secret-2"]})
    crash.write_folder(tmp_path, told, timeline={}, stacks="very-secret-2", argv=argv)
    whole = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "very-secret" not in whole
    assert "cannot reach host with *** and ***" in whole
    assert "recompiles" in (tmp_path / "environment.json").read_text()
    data = json.loads((tmp_path / "crash.json").read_text())
    assert data["argv"] == ["train.py", "--token", "***", "--lr", "1"]


def test_a_folder_that_cannot_be_made_is_told_and_not_raised(tmp_path):
    (tmp_path / "file").write_text("in the way")
    why = crash.write_folder(tmp_path / "file" / "x", content(), timeline={})
    assert why is not None and "cannot be written" in why and "\n" not in why


def test_a_disk_that_fills_up_leaves_no_folder_that_looks_whole(tmp_path, monkeypatch):
    crash.write_folder(tmp_path, content(), timeline={})  # an earlier failure
    write = crash._write

    def full(path, text):
        if path.name == "timeline.json":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(crash, "_write", full)
    why = crash.write_folder(tmp_path, content(), timeline={})
    assert why is not None and "No space left on device" in why
    assert not (tmp_path / "crash.json").exists()
    assert not list(tmp_path.glob("*.part"))


def test_clear_takes_an_earlier_failure_away_and_nothing_else(tmp_path):
    folder = tmp_path / "report"
    crash.write_folder(folder, content(), timeline={})
    crash.write_folder(folder / "process-7", content(), timeline={})
    (folder / "mine.txt").write_text("keep")
    crash.clear(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    crash.clear(folder)
    assert not folder.exists()
    crash.clear(folder)  # and a second time


def test_a_folder_with_somebody_elses_files_is_foreign_and_ours_is_not(tmp_path):
    assert not crash.is_foreign(tmp_path / "none") and not crash.is_foreign(tmp_path)
    (tmp_path / "README.txt").write_text("theirs")
    assert crash.is_foreign(tmp_path)
    (tmp_path / "stacks.txt").write_text("left by a full disk: the first that is written")
    assert not crash.is_foreign(tmp_path)
    (tmp_path / "stacks.txt").rename(tmp_path / "stacks.txt.4711.part")  # killed while it wrote
    (tmp_path / "README.txt").unlink()
    assert not crash.is_foreign(tmp_path)
    crash.clear(tmp_path)
    tmp_path.mkdir()
    (tmp_path / "model.py").write_text("theirs")
    assert crash.is_foreign(tmp_path)
    (tmp_path / "crash.json").write_text("{}")
    assert crash.is_foreign(tmp_path)
    crash.write_folder(tmp_path, content(), timeline={})
    assert not crash.is_foreign(tmp_path)


@pytest.fixture
def record() -> dict:
    """A trial's record of one thread that met another's trace."""
    error = failure()["error"]
    outcome = {"steps": 2, "seconds": 1.0, "stack": []}
    return {
        "torch": "2.11.0",
        "python": "3.12.1",
        "unfix": {"fx-tracing-flag": True},
        "outcomes": [
            {"thread": "drafter-0", "state": "completed", "error": None, **outcome},
            {"thread": "drafter-1", "state": "raised", "error": error, **outcome},
        ],
        "watch": {
            "holders": {
                "drafter-1": {"thread": "drafter-0", "state": "fx-tracing-flag", "stack": []}
            },
            "timeline": [
                {"t": t, "thread": thread, "what": what, "step": None, "detail": ""}
                for t, thread, what in (
                    (1.0, "drafter-0", "trace.begin"),
                    (1.5, "drafter-1", "call.enter"),
                    (1.75, "drafter-1", "call.exit"),
                    (2.0, "drafter-0", "trace.left"),
                    (3.0, "drafter-0", "trace.begin"),
                )
            ],
            "exposures": {"fx-trace": {"drafter-1": 1}},
        },
        "probes": [
            {"probe": "a", "where": "w", "rest": "1", "value": "2", "at_rest": False},
            {"probe": "b", "where": "w", "rest": "1", "value": "1", "at_rest": True},
        ],
        "script": {"steps": ["drafter-0 trace.body"], "passed": [], "missed": None},
    }


def test_a_cases_record_becomes_the_same_folder(tmp_path, record):
    told, timeline = crash.from_record(record)
    assert crash.write_folder(tmp_path, told, timeline=timeline) is None
    data = json.loads((tmp_path / "crash.json").read_text())
    (failed,) = data["failures"]
    assert failed["thread"] == "drafter-1" and failed["died"]
    assert failed["culprit"]["thread"] == "drafter-0"
    assert failed["culprit"]["span"] == {
        **{"thread": "drafter-0", "kind": "trace", "start": 1.0, "end": 2.0}
    }
    assert data["versions"] == {"python": "3.12.1", "torch": "2.11.0"}
    assert [row["probe"] for row in data["stuck"]] == ["a"]
    assert data["schedule"]["steps"] == ["drafter-0 trace.body"]
    assert len(json.loads((tmp_path / "timeline.json").read_text())["events"]) == 5


def test_a_holder_inside_two_traces_held_the_state_from_the_outer_one_on(record):
    """The inner one was over before the victim failed; there was an overlap all the same."""
    for t, what in ((1.1, "trace.begin"), (1.2, "trace.left")):
        record["watch"]["timeline"].insert(
            1, {"t": t, "thread": "drafter-0", "what": what, "step": None, "detail": ""}
        )
    record["watch"]["timeline"].sort(key=lambda event: event["t"])
    told, _ = crash.from_record(record)
    span = told["failures"][0]["culprit"]["span"]
    assert (span["start"], span["end"]) == (1.0, 2.0)


def test_a_case_that_died_without_a_record_is_a_folder_too(tmp_path):
    told, timeline = crash.from_record({"process": {"ended": "signal", "what": "died by SIGSEGV"}})
    assert crash.write_folder(tmp_path, told, timeline=timeline, stacks="Fatal") is None
    assert "Fatal" in (tmp_path / "stacks.txt").read_text()
