"""What the documents say is run: the examples work, the files exist, the commands are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_the_guard_example_runs(tmp_path):
    (example,) = (block for block in blocks("python") if "compile_guard(" in block)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "{'worker-0': 1, 'worker-1': 1, 'worker-2': 1}" in done.stdout


def test_the_gate_example_passes(pytester):
    (example,) = (block for block in blocks("python") if "race_trial" in block)
    pytester.makepyfile(test_my_race=example)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=200)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["my_code *3/3*completed*yes*"])


def test_the_harness_example_passes_and_every_option_and_fixture_is_named(pytester):
    text = (ROOT / "docs" / "harness.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    pytester.makepyfile(test_my_threads=example)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=200)
    result.assert_outcomes(passed=1)
    plugin = (ROOT / "harness" / "plugin.py").read_text()
    for name in re.findall(r'"(--race-[a-z]+)"', plugin) + re.findall(
        r"^def (race_\w+)", plugin, re.M
    ):
        if name != "race_isolation":  # what race_isolated is made of
            assert f"`{name}" in text, f"docs/harness.md does not name {name}"


def test_every_command_that_the_documents_name_is_there():
    from typer.main import get_command

    import dflash.cli
    import harness.cli

    for program, app in (("harness", harness.cli.app), ("dflash", dflash.cli.app)):
        known = set(get_command(app).commands)
        for path in DOCS:
            text = path.read_text()
            code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.M | re.S)
            for name in re.findall(rf"(?:^|`){program} ([a-z][a-z-]+)", "\n".join(code), re.M):
                assert name in known, f"{path.name} names '{program} {name}'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ""),
        (["nosuch"], "error: No such command 'nosuch'; see 'dflash --help'\n"),
        (["plan"], "error: Missing argument 'recipe'; see 'dflash plan --help'\n"),
        (["doctor", "--nosuch"], "error: No such option: --nosuch; see 'dflash doctor --help'\n"),
    ],
)
def test_a_wrong_command_line_of_the_trainer_is_one_line(words, said):
    done = subprocess.run(
        [sys.executable, "-m", "dflash", *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, said)
    assert ("Usage: dflash" in done.stdout) == (not words)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_architecture_names_every_module_and_no_other():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    for package in ("harness", "dflash"):
        for path in (ROOT / package).glob("*"):
            if path.name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
                continue
            name = f"{path.name}/" if path.is_dir() else path.name
            known = name in named or any(entry.startswith(name) for entry in named)
            assert known, f"docs/architecture.md does not name {package}/{name}"
    for name in named:
        places = [ROOT / name, *(ROOT / p / name for p in ("harness", "dflash", "tests"))]
        assert any(place.exists() for place in places), f"{name} is named and does not exist"


def test_the_two_commands_are_the_ones_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    for session in ("race", "tests"):
        assert f"python -m nox -s {session}" in README
        assert f"nox -s {session}" in ci


def test_packages_do_not_import_each_other():
    for package, other in (("harness", "dflash"), ("dflash", "harness")):
        for path in (ROOT / package).rglob("*.py"):
            pattern = rf"^\s*(from|import) {other}(\.|\s|$)"
            assert not re.search(pattern, path.read_text(), re.M), f"{path} imports {other}"
