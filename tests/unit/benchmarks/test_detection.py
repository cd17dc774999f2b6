"""The comparison's arithmetic: what counts as a detection, and that its scripts are scripts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from harness.schedule import Script

PATH = Path(__file__).parents[3] / "benchmarks" / "detection.py"


@pytest.fixture
def detection(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # it adds a folder
    spec = importlib.util.spec_from_file_location("detection", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "detection", module)
    spec.loader.exec_module(module)
    return module


RACE = "RuntimeError: Detected that you are using FX to symbolically trace a function."


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ({"red": True, "text": RACE}, "detected"),
        ({"red": True, "text": "AssertionError: Thread.__init__() not called"}, "other failure"),
        ({"red": False, "text": "script missed: it was never reached"}, "other failure"),
        ({"red": True, "text": "hang: no progress", "hung": True}, "hung"),
        ({"red": True, "text": RACE, "hung": True}, "detected"),
        ({"red": False, "text": "inconclusive", "unsure": True}, "inconclusive"),
        ({"red": False}, "missed"),
    ],
)
def test_only_the_races_own_failure_is_a_detection(detection, said, outcome):
    body = detection.BODIES["original"]
    assert detection.outcome_of(body, detection.Said(**said)) == outcome


def test_every_body_has_a_program_and_a_script_for_its_threads(detection):
    for body in detection.BODIES.values():
        assert callable(getattr(detection, body.program))
        threads = {step.role for step in Script(body.script).steps}
        assert threads <= {f"thread-{index}" for index in range(body.parts)}


def test_a_tool_that_is_not_installed_is_said_and_not_counted(detection, monkeypatch, capsys):
    monkeypatch.setattr(detection.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # main() sets it
    monkeypatch.setattr(sys, "argv", ["detection.py", "--tool", "frontrun", "--body", "original"])
    assert detection.main() == 0
    assert "not measured: frontrun is not installed" in capsys.readouterr().out


def test_modules_are_named_as_frontrun_matches_them(detection):
    assert detection.pattern_of("torch/fx") == "torch.fx.*"
    assert detection.pattern_of("torch/_dynamo/eval_frame.py") == "torch._dynamo.eval_frame"
