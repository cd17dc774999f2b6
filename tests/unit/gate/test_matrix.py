"""The version matrix's document: what was not run says so, and bad input is one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    """The script, loaded by its path; importing it imports no torch."""
    spec = importlib.util.spec_from_file_location(
        "version_matrix", ROOT / "tests" / "specimens" / "matrix.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(torch: str, verdicts: dict[str, int], unmet: list[str]) -> dict[str, object]:
    native = {"verdicts": verdicts, "unmet": unmet}
    guarded = {"verdicts": {"raised": 1}, "unmet": [], "refused": True}
    return {
        "schema": 1,
        "torch": torch,
        "python": "3.11.7",
        "runs": 3,
        "leaks": {"fx-patcher": 2},
        "unknown": ["region-id"],
        "sticky": [],
        "problems": [],
        "specimens": [
            {"name": "young", "state": "s"},
            {"name": "old", "state": "s", "native": native, "guarded": guarded},
        ],
    }


def put(folder: Path, name: str, content: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_tables_stand_between_the_markers_and_say_what_was_not_run(matrix, tmp_path):
    put(tmp_path, "a", result("2.11.0+cu130", {"raised": 2, "completed": 1}, ["it differs"]))
    document = tmp_path / "versions.md"
    document.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    for _ in range(2):  # a second time changes nothing
        assert matrix.main(["write", str(tmp_path), str(document)]) == 0
        text = document.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
        assert "| 2.15.0 | not run | | |" in text
        cells = "| not run | raised 2 of 3, completed 1 of 3 (!) | not run | not run | not run |"
        assert f"| `old` {cells} the order cannot be had |" in text
        assert "| `young` | not run | - |" in text
        assert "* torch 2.11.0: old, native: it differs" in text


def test_what_cannot_be_a_result_is_refused_in_one_line(matrix, tmp_path, capsys):
    document = tmp_path / "versions.md"
    document.write_text("no markers\n")

    def said() -> str:
        assert matrix.main(["write", str(tmp_path), str(document)]) == 2
        assert document.read_text() == "no markers\n"
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    assert "holds no result" in said()
    put(tmp_path, "a", result("2.11.0", {"raised": 1}, []))
    assert "needs the lines" in said()
    put(tmp_path, "b", result("2.11.0+cpu", {"raised": 1}, []))
    assert "is in another file too" in said()
    put(tmp_path, "b", {"schema": 9})
    assert "schema 9" in said()
    put(tmp_path, "b", ["nothing"])
    assert "is not a result" in said()


def test_the_session_and_the_document_mean_the_same_versions(matrix):
    quoted = ", ".join(f'"{version}"' for version in matrix.VERSIONS)
    assert f"MATRIX_TORCH = ({quoted})" in (ROOT / "noxfile.py").read_text()


def test_what_differs_is_told(matrix):
    assert matrix.unmet(result("2.11.0", {"raised": 1}, [])) == []
    assert matrix.unmet(result("2.11.0", {"raised": 1}, ["x"])) == ["old, native: x"]
