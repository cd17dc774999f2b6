"""What ``harness triage`` does: reads, diagnoses, prints in the form that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import typer
from rich.console import Console

from harness.triage import Diagnosis, search, triage_paths
from harness.triage.collect import Group
from harness.triage.output import as_github, as_json, as_sarif, headline
from harness.triage.show import markdown, terminal

FORMS = ("json", "markdown", "sarif", "github", "grep")


def run(
    logs: Sequence[str],
    form: str | None,
    *,
    follow: bool = False,
    idle: float | None = None,
    trace: str | None = None,
) -> int:
    """Prints the diagnosis; returns 0 when nothing was found, else 1.

    The form "grep" is the pattern of the search; it needs no log and returns 0.

    Raises:
        harness.triage.Unreadable: a log cannot be read.
        ValueError: options that do not go together.
    """
    if form == "grep":
        if logs:
            raise ValueError("--grep prints the pattern of the search and reads no log")
        typer.echo(search().grep())
        return 0
    if idle is not None and not follow:
        raise ValueError("--idle SECONDS goes with --follow")
    if idle is not None and not idle > 0:
        raise ValueError("--idle SECONDS must be more than 0")
    on_new: Callable[[Group], None] | None = _say if follow and form is None else None
    diagnosis = triage_paths(logs, follow=follow, idle=idle, trace=trace, on_new=on_new)
    typer.echo(render(diagnosis, form))
    return diagnosis.exit_code


def render(diagnosis: Diagnosis, form: str | None) -> str:
    """The diagnosis in one of :data:`FORMS` but "grep"; None: for the terminal."""
    match form:
        case "json":
            return json.dumps(as_json(diagnosis), indent=1)
        case "sarif":
            return json.dumps(as_sarif(diagnosis), indent=1)
        case "markdown":
            return markdown(diagnosis)
        case "github":
            return "\n".join(as_github(diagnosis))
        case _:
            console = Console()
            width = console.width if console.is_terminal else 100
            return terminal(diagnosis, width=width, color=console.is_terminal).rstrip("\n")


def _say(group: Group) -> None:
    """While a log is followed: one line as soon as something new fails."""
    when = f"{group.first_time} " if group.first_time else ""
    typer.echo(f"{when}{group.event.place}: {headline(group)}".replace("\n", " "), err=True)
