"""The demo's verdict: each promise that is not kept is said and makes the exit code 1."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "demo.py"
GOOD = {
    "tau": 4.2,
    "speedup": 2.3,
    "identical": 144,
    "sums": {"speculative": {"prompts": 144}},
}


@pytest.fixture
def demo(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("demo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = tmp_path / "run"

    def do(greedy=GOOD, sampled=GOOD, missing=()):
        def dflash(*arguments):
            if arguments[0] == "train":
                for name in set(module.MADE) - set(missing):
                    (run / name).mkdir(parents=True)

        def both(_run):
            (run / "eval-t0.json").write_text(json.dumps(greedy))
            (run / "eval-t1.json").write_text(json.dumps(sampled))

        monkeypatch.setattr(module, "_dflash", dflash)
        monkeypatch.setattr(module, "_both", both)
        monkeypatch.setattr("sys.argv", ["demo.py", "--output", str(run)])
        return module.main()

    return do


def test_all_promises_kept_is_exit_code_0(demo, capsys):
    assert demo() == 0
    assert "MISSED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"greedy": GOOD | {"tau": 3.99}}, "tau at temperature 0: 3.99"),
        ({"sampled": GOOD | {"tau": 1.99}}, "tau at temperature 1: 1.99"),
        ({"greedy": GOOD | {"speedup": 1.9}}, "wall clock against plain cached decoding: 1.90 x"),
        ({"greedy": GOOD | {"identical": 143}}, "identical to plain greedy: 143 of 144"),
        ({"missing": ["report.html"]}, "report.html is in the run's folder"),
    ],
)
def test_each_broken_promise_is_exit_code_1(demo, capsys, changes, said):
    assert demo(**changes) == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSED")]
    assert len(missed) == 1 and said in missed[0]
