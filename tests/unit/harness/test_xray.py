"""The x-ray: forced, so the same every time; it sees what it must, and what stays is a finding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx._symbolic_trace as st
from typer.testing import CliRunner

from harness import xray as module
from harness.cli import app
from harness.isolate import Isolation
from harness.report import xray as table
from harness.stages import STAGES, Stage, StageAbsent
from harness.unfix import CATALOGUE as UNFIXES
from harness.xray import Cell, Column, Look, XRay, examine

THREAD_LOCAL_FLAG = hasattr(st, "_is_fx_tracing_tls")
HAS_SESSION = hasattr(torch.compiler, "_compile_session_context")


def looks(isolation: Isolation, stage: str, *unfix: str) -> dict[str, str]:
    """Probe -> look of one stage, in a process of its own."""
    result = isolation.run(examine, {"stage": stage, "unfix": list(unfix)}, deadline=100)
    assert result.ended == "returned", result.error
    assert result.value["problem"] == ""
    return {name: cell["look"] for name, cell in result.value["cells"].items()}


# stage -> states that another thread must see there, on every supported torch
LEAKS = {
    "wrapper": (),
    "entry": ("compile-lock",),
    "dynamo": ("compile-lock", "pending-callbacks"),
    "aot": ("compile-lock",),
    "forward": ("fx-patcher", "module-call", "module-getattr", "make-fx-tracer"),
    "joint": ("fx-patcher", "module-call", "module-getattr", "make-fx-tracer"),
    "bwd-trace": ("fx-patcher", "module-call", "traceback-preserve"),
    "backend": ("compile-lock",),
    "warm": (),
    "bwd-lazy": (),
    "make_fx": ("fx-patcher", "module-call", "make-fx-tracer"),
    "fx": ("fx-patcher", "module-call"),
    "annotate": ("traceback-meta",),
    "eager-flex": ("compile-lock",),
    "export": ("is-exporting",),
}
OWN = {"dynamo": "tracing-context", "backend": "dispatch-stack", "bwd-lazy": "tracing-context"}


@pytest.mark.parametrize("stage", LEAKS)
def test_a_stage_is_reached_and_shows_what_it_must(isolation: Isolation, stage: str) -> None:
    found = looks(isolation, stage)
    for name in LEAKS[stage]:
        assert found[name] == Look.SEEN, name
    if stage in OWN:
        assert found[OWN[stage]] == Look.OWN
    assert found["grad-mode"] != Look.SEEN, "a thread's own state is not seen by others"


def test_every_quick_stage_has_its_row_here() -> None:
    assert set(LEAKS) == {stage.name for stage in STAGES if not stage.slow}
    assert len({stage.name for stage in STAGES}) == len(STAGES)


def test_the_same_stage_looks_the_same_every_time(isolation: Isolation) -> None:
    first = looks(isolation, "joint")
    assert all(looks(isolation, "joint") == first for _ in range(3))


def test_a_repair_that_is_taken_out_shows_what_it_had_hidden(isolation: Isolation) -> None:
    """The x-ray as negative control of the repairs, and the other way round."""
    assert looks(isolation, "dynamo")["metrics-context"] == Look.OWN
    assert looks(isolation, "dynamo", "metrics-context")["metrics-context"] == Look.SEEN
    flag = Look.OWN if THREAD_LOCAL_FLAG else Look.SEEN
    assert looks(isolation, "joint")["fx-tracing-flag"] == flag
    assert looks(isolation, "joint", "fx-tracing-flag")["fx-tracing-flag"] == Look.SEEN
    if HAS_SESSION:
        assert looks(isolation, "dynamo")["is-compiling"] == Look.SEEN
        assert looks(isolation, "dynamo", "session-flag")["is-compiling"] == Look.REST


# -- negative controls of the x-ray itself -------------------------------------------------------


def _leave_patched(_stop: Any) -> Any:
    def dirty() -> None:
        torch.nn.Module.__call__ = lambda self, *args: self.forward(*args)

    return dirty


def _raise(_stop: Any) -> Any:
    def fail() -> None:
        raise ZeroDivisionError("of its own")

    return fail


def _stop_and_leave(stop: Any) -> Any:
    def dirty() -> None:
        st.CURRENT_PATCHER = st._Patcher()
        stop()

    return dirty


def _too_new(_stop: Any) -> Any:
    raise StageAbsent("this torch has no such thing")


SPECIMENS = {
    "absent": Stage("absent", "-", _too_new),
    "not reached": Stage("not reached", "-", _leave_patched, "trace.body"),
    "raises": Stage("raises", "-", _raise),
    "stays": Stage("stays", "-", _stop_and_leave),
    "no such place": Stage("no such place", "-", _raise, "torch.fx:no_such_function@entry"),
}


def specimen(*, name: str) -> dict[str, Any]:
    """Runs in its own process: one stage that is not as it should be."""
    session = module._Session(SPECIMENS[name])
    session.run()
    return {
        "problem": session.problem,
        "absent": session.absent,
        "stays": {probe: cell.stays for probe, cell in session.cells().items() if cell.stays},
        "cells": len(session.cells()),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not reached", "was not reached"),
        ("raises", "the program raised ZeroDivisionError: of its own"),
        ("no such place", "no_such_function"),
    ],
)
def test_a_stage_that_shows_nothing_says_why(isolation: Isolation, name: str, words: str) -> None:
    value = isolation.run(specimen, {"name": name}, deadline=60).value
    assert words in value["problem"]
    assert value["cells"] == 0, "nothing was seen, so nothing is claimed"


def test_a_stage_that_torch_has_not_got_is_no_problem(isolation: Isolation) -> None:
    value = isolation.run(specimen, {"name": "absent"}, deadline=60).value
    assert value["absent"] == "this torch has no such thing"
    assert value["problem"] == "" and value["cells"] == 0
    column = Column("annotate", "inside", absent="this torch has no such thing")
    found = XRay("2.9.1", "3.11.7", (), (column,))
    assert found.problems() == [] and found.absent() == ["annotate: this torch has no such thing"]
    text = table.render(found, width=100, color=False)
    assert "annotate: inside (this torch has no such thing)" in text
    assert "not seen" not in text


def test_a_state_that_stays_is_seen_to_stay(isolation: Isolation) -> None:
    value = isolation.run(specimen, {"name": "stays"}, deadline=60).value
    assert value["problem"] == ""
    assert value["stays"] == {"fx-patcher": "'installed'"}


# -- the table -----------------------------------------------------------------------------------


def made(stays: str = "", problem: str = "", look: Look = Look.SEEN) -> XRay:
    """A table of two stages; what is not named is at rest."""
    cells = {probe.name: Cell(Look.REST) for probe in module.probes.CATALOGUE}
    busy = cells | {"fx-patcher": Cell(look, "'<b>installed'", stays)}
    first = Column("joint", "inside <Tracer.trace>", "", busy)
    second = Column("fx", "inside", problem, {} if problem else cells)
    return XRay("2.13.0", "3.11.7", (), (first, second))


def test_the_summary_counts_leaks_and_names_what_stays() -> None:
    found = made(stays="'installed'")
    assert found.leaks() == {"fx-patcher": ["joint"]}
    assert found.sticky() == ["fx-patcher stays 'installed' after joint"]
    assert [probe.name for probe, _ in found.rows()] == ["fx-patcher"]
    assert "module-call" in found.quiet() and "fx-patcher" not in found.quiet()
    assert made(look=Look.OWN).leaks() == {}


def test_what_a_stage_leaves_by_design_is_shown_and_is_no_finding() -> None:
    cells = {"eager-flex-warning": Cell(Look.SEEN, "['x']", "['x']")}
    found = XRay("2.13.0", "3.11.7", (), (Column("eager-flex", "-", "", cells),))
    assert found.sticky() == []
    assert "●!" in table.render(found, width=100, color=False)
    other = XRay("2.13.0", "3.11.7", (), (Column("joint", "-", "", cells),))
    assert other.sticky() == ["eager-flex-warning stays ['x'] after joint"]


def test_the_terminal_fits_a_narrow_screen() -> None:
    text = table.render(made(problem="was not reached"), width=72, color=False)
    assert all(len(line) <= 72 for line in text.splitlines())
    assert re.search(r"fx-patcher +● +\?", text)
    assert "not seen: fx: was not reached" in text


def test_the_page_stands_alone_and_escapes_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "xray.html"
    table.write_html(made(stays="'installed'"), path)
    page = path.read_text()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert "<b>installed" not in page and "inside &lt;Tracer.trace&gt;" in page
    assert "sticky: fx-patcher stays" in page
    clean = tmp_path / "clean.html"
    table.write_html(made(), clean)
    assert "no state stays after any of them" in clean.read_text()


@pytest.mark.parametrize(
    ("found", "code"),
    [(made(), 0), (made(stays="'installed'"), 1), (made(problem="was not reached"), 1)],
    ids=["clean", "sticky", "not whole"],
)
def test_the_command_says_by_its_exit_code_whether_something_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: XRay, code: int
) -> None:
    monkeypatch.setattr(module, "xray", lambda **_: found)
    result = CliRunner().invoke(app, ["xray", "--json", "--html", str(tmp_path / "x.html")])
    assert result.exit_code == code
    data = json.loads(result.stdout)
    assert data["leaks"] == {"fx-patcher": ["joint"]}
    assert data["columns"][0]["cells"]["fx-patcher"]["look"] == "seen"
    assert (tmp_path / "x.html").exists()


def test_a_page_that_cannot_be_written_does_not_take_the_table_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(module, "xray", lambda **_: made())
    path = str(tmp_path / "file" / "x.html")
    result = CliRunner().invoke(app, ["xray", "--json", "--html", path])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["leaks"] == {"fx-patcher": ["joint"]}
    assert f"error: --html {path} cannot be written" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stage", "lunch"], "unknown stage 'lunch': there are wrapper, "),
        (["--unfix", "everything"], f"unknown unfix 'everything': there are {next(iter(UNFIXES))}"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["xray", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_whole_command_runs_one_stage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["xray", "--stage", "annotate", "--json"])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["torch"] == torch.__version__ and data["problems"] == []
    assert data["leaks"] == {"traceback-meta": ["annotate"]}


def test_a_stage_that_is_reached_after_the_bystander_gave_up_is_a_problem():
    """Nobody looked: there is no table to be made of it."""
    session = module._Session(Stage("late", "comes too late", lambda stop: stop))
    session._there.wait = lambda _seconds: False
    session.run()
    assert session.problem == "was not reached" and session.cells() == {}
