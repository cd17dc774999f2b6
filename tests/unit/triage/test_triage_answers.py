"""The answer and its forms: who died and who went silent, JSON, SARIF, annotations, the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.triage import triage_text
from harness.triage.output import as_github, as_json, as_sarif
from harness.triage.show import markdown, terminal

OPEN = Path(__file__).parents[2] / "triage" / "open"
RACE = (OPEN / "drafters_unfixed.log").read_text()
CALM = (OPEN / "one_recompile_and_done.log").read_text()


def test_who_died_in_which_order_and_who_lives():
    fates = {fate.who: fate.state for fate in triage_text(RACE).fates}
    assert fates == {
        "drafter-0": "died", "drafter-1": "alive", "drafter-2": "died", "MainThread": "alive",
    }  # fmt: skip
    order = [fate.who for fate in triage_text(RACE).fates]
    assert order[:2] == ["drafter-0", "drafter-2"]


def test_a_rank_that_never_speaks_again_is_silent():
    lines = [f"[rank{i % 4}]: step {i} loss 2.0" for i in range(400)]
    quiet = [line for i, line in enumerate(lines) if not (line.startswith("[rank2]") and i > 60)]
    fates = {fate.who: fate.state for fate in triage_text("\n".join(quiet)).fates}
    assert fates == {"rank 0": "alive", "rank 1": "alive", "rank 2": "silent", "rank 3": "alive"}
    fates = {fate.who: fate.state for fate in triage_text("\n".join(lines)).fates}
    assert set(fates.values()) == {"alive"}


@pytest.mark.parametrize(("behind", "state"), [("", "died"), ("[rank0]: step 7\n", "alive")])
def test_a_rank_whose_exit_the_launcher_tells_has_died(behind, state):
    """Its thread failed; only the launcher's line says that the process ended."""
    text = RACE.replace("Exception in thread", "[rank0]: Exception in thread")
    text += (
        "E0808 01:02:03.000000 12 torch/distributed/elastic/multiprocessing/api.py:984] failed"
        " (exitcode: 1) local_rank: 0 (pid: 51) of binary: /opt/venv/bin/python\n"
    )
    fates = {
        fate.who: fate.state for fate in triage_text("[rank0]: step 1\n" + text + behind).fates
    }
    assert fates["rank 0"] == state


def test_how_long_the_log_goes_on_after_the_first_failure():
    diagnosis = triage_text((OPEN / "drafter_dies_ranks_wait.log").read_text())
    assert 590 < diagnosis.seconds_after < 610
    assert "goes on for" in terminal(diagnosis)


def test_the_json_form_is_the_documented_one():
    data = json.loads(json.dumps(as_json(triage_text(RACE, name="a.log"))))
    assert data["schema"] == 1 and data["exit_code"] == 1
    docs = (Path(__file__).parents[3] / "docs" / "triage.md").read_text()
    for key in data:
        assert f"`{key}`" in docs, key
    for part in ("causes", "failures", "speakers"):
        for key in data[part][0]:
            assert f"`{key}`" in docs, f"{part}: {key}"
    frame = data["failures"][0]["frames"][-1]
    assert frame["act"] == "fx_check" and frame["role"].startswith("raises here")
    assert data["failures"][0]["cause"] == data["causes"][0]["id"] == "fx-flag-other-thread"


def test_sarif_and_annotations_stand_at_the_log_s_line():
    diagnosis = triage_text(RACE, name="logs/a,b.log")
    (run,) = as_sarif(diagnosis)["runs"]
    (result,) = run["results"]
    assert result["ruleId"] == "fx-flag-other-thread" and result["level"] == "error"
    assert result["ruleId"] in {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    place = result["locations"][0]["physicalLocation"]
    assert place["region"]["startLine"] == 20 and place["artifactLocation"]["uri"] == "logs/a,b.log"
    (line,) = as_github(diagnosis)
    assert line.startswith("::error file=logs/a%2Cb.log,line=20,title=fx-flag-other-thread::")
    assert "\n" not in line
    assert (
        not list(as_github(triage_text(CALM)))
        and not as_sarif(triage_text(CALM))["runs"][0]["results"]
    )


def test_markdown_for_an_issue():
    text = markdown(triage_text(RACE, name="a.log"))
    assert "fx-flag-other-thread" in text and "| 1 |" in text and "<details>" in text
    assert "Nothing failed" in markdown(triage_text(CALM))


HOSTILE = (
    "Exception in thread w|`1`:\nTraceback (most recent call last):\n"
    '  File "/opt/```.py", line 3, in f\n    g()\n'
    "ValueError: a|b `c` <img src=x> @team #7 [x](http://x) 100% ::error::\x1bc\x9b31m\x00\n"
)


def test_text_of_a_log_is_no_markdown():
    text = markdown(triage_text(HOSTILE, name="a|b`.log"))
    (row,) = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7 and row.count("`") == 6
    outside = "".join(re.split(r"(?<!\\)`[^`\n]*`", text.replace("```", "")))
    assert not re.search(r"(?<!\\)<img|@team|(?<!\\)#7|(?<!\\)\[x|(?<!\\)\*b", outside)
    assert text.count("```") == 2  # the fence of the stack, and nothing inside it


def test_text_of_a_log_is_no_command_of_a_terminal_or_a_workflow():
    diagnosis = triage_text(HOSTILE, name="a b%,:.log")
    for text in (terminal(diagnosis), markdown(diagnosis), "".join(as_github(diagnosis))):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    (line,) = as_github(diagnosis)
    assert (
        line.startswith("::error file=a b%25%2C%3A.log,line=2,title=unknown::") and "100%25" in line
    )
    (line,) = as_github(triage_text(HOSTILE))  # standard input is no file
    assert line.startswith("::error title=unknown::")
    (result,) = as_sarif(diagnosis)["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b%25,%3A.log"


def test_the_terminal_form_has_colours_only_on_demand():
    diagnosis = triage_text(RACE)
    assert "\x1b" not in terminal(diagnosis) and "\x1b[" in terminal(diagnosis, color=True)
    text = terminal(diagnosis, width=200)
    assert "eval_frame.py:1120 compile_wrapper  [raises here" in text
    assert "torch 2.13.0 (stated" in text and "LC_ALL=C grep -nE" in text


def test_text_of_a_log_is_never_markup():
    text = "Traceback (most recent call last):\n" + '  File "/a.py", line 1, in f\n    x[/red]\n'
    assert "[/bold] boom" in terminal(triage_text(text + "ValueError: [/bold] boom\n"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([str(OPEN / "one_recompile_and_done.log")], 0, "nothing failed"),
        ([str(OPEN / "drafters_unfixed.log")], 1, "fx-flag-other-thread"),
        ([str(OPEN / "drafters_unfixed.log"), "--github"], 1, "::error"),
        ([str(OPEN / "drafters_unfixed.log"), "--markdown"], 1, "###"),
        ([str(OPEN / "drafters_unfixed.log"), "--sarif"], 1, "2.1.0"),
        ([str(OPEN / "missing.log")], 2, "cannot be read"),
        ([], 2, "no log is named"),
        ([str(OPEN / "drafters_unfixed.log"), "--json", "--sarif"], 2, "do not go together"),
        ([str(OPEN / "drafters_unfixed.log"), "--idle", "1"], 2, "goes with --follow"),
        (["a.log", "b.log", "--follow"], 2, "one log"),
        (["a.log", "--follow", "--idle", "0"], 2, "more than 0"),
        (["a.log", "--follow", "--idle", "nan"], 2, "more than 0"),
        (["--grep"], 0, "|Traceback \\(most recent call|"),
        (["a.log", "--grep"], 2, "reads no log"),
        (["--trace", str(OPEN / "missing")], 2, "missing"),
    ],
)
def test_the_command_and_its_exit_code(arguments, code, said):
    result = CliRunner().invoke(app, ["triage", *arguments])
    assert result.exit_code == code and said in result.output


def test_torch_is_not_imported():
    code = (
        "import sys; from harness.triage import triage_paths; "
        f"d = triage_paths([{str(OPEN / 'drafters_unfixed.log')!r}]); d.to_json(); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0
