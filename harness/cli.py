"""The command ``harness``. Exit codes: 0 good, 1 a check failed, 2 bad input; 3, 4: the gate."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

BAD_INPUT = 2
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes compile races in threaded torch.compile programs happen, sees them, names them.",
)


def _bad_input(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(BAD_INPUT)


@app.callback()
def _warn_about_torch() -> None:
    """Outside the versions it was run on, the harness still goes on, but says so once."""
    from harness.preconditions import SUPPORTED_TORCH

    try:
        installed = version("torch")
    except PackageNotFoundError:
        return
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    if not SUPPORTED_TORCH[0] <= numbers <= SUPPORTED_TORCH[1]:
        oldest, newest = (".".join(map(str, pair)) for pair in SUPPORTED_TORCH)
        typer.echo(
            f"warning: torch {installed} is outside {oldest} to {newest}; "
            "some points and probes may be missing",
            err=True,
        )


@app.command()
def probes(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Shows the compile state that threads share on the installed torch, and its value at rest."""
    from harness.probes import CATALOGUE, UNKNOWN, load_all, read, show

    load_all()
    values = {probe.name: read(probe) for probe in CATALOGUE}
    if as_json:
        rows = [
            {
                "probe": probe.name,
                "where": probe.where,
                "scope": probe.scope,
                "value": None if values[probe.name] is UNKNOWN else show(values[probe.name]),
                "known": values[probe.name] is not UNKNOWN,
                "grows": probe.grows,
                "versions": probe.versions,
                "source": probe.source,
            }
            for probe in CATALOGUE
        ]
        typer.echo(json.dumps({"torch": version("torch"), "probes": rows}, indent=1))
        return
    table = Table(box=None, pad_edge=False, title=f"torch {version('torch')}", title_justify="left")
    for column in ("probe", "scope", "value at rest", "torch", "where", "see"):
        table.add_column(column, overflow="fold", min_width=6)
    for probe in CATALOGUE:
        rest = show(values[probe.name]) + (" (grows)" if probe.grows else "")
        table.add_row(probe.name, probe.scope, rest, probe.versions, probe.where, probe.source)
    Console().print(table)


@app.command()
def xray(
    inductor: Annotated[bool, typer.Option(help="Inductor's stage too (some 20 s more)")] = False,
    unfix: Annotated[
        list[str] | None, typer.Option(help="take this repair of torch out first (repeatable)")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="this stage only (repeatable); all by default")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    html: Annotated[Path | None, typer.Option(help="write the table as a page there")] = None,
) -> None:
    """Shows which compile state another thread sees, stage by stage; exit code 1 if one stays."""
    from harness import xray as module
    from harness.report import xray as table

    say = Console(stderr=True)
    try:
        with say.status("x-ray") as status:
            found = module.xray(
                inductor=inductor,
                unfix=unfix or (),
                only=stage or (),
                progress=lambda name: status.update(f"x-ray: {name}"),
            )
    except (ValueError, OSError, module.IsolationError) as error:
        raise _bad_input(str(error)) from error
    console = Console()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        text = table.render(found, width=max(72, console.width), color=console.is_terminal)
        typer.echo(text, nl=False)
    if html is not None:
        try:
            table.write_html(found, html)
        except OSError as error:
            raise _bad_input(f"--html {html} cannot be written: {error}") from error
    if table.findings(found):
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a folder written by --race-report")] = Path(
        "build/race"
    ),
) -> None:
    """Shows the table of an earlier run again; exit code 1 if a case was not as expected."""
    from harness.report import table
    from harness.report.row import Row

    path = folder / "report.json"
    try:
        rows = [Row.from_dict(row) for row in json.loads(path.read_text())["cases"]]
    except OSError as error:
        raise _bad_input(
            f"{path}: cannot be read ({error.strerror}); run 'nox -s race' first"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _bad_input(f"{path}: is not a report of this harness ({error})") from error
    console = Console()
    typer.echo(table.render(rows, width=max(72, console.width), color=console.is_terminal))
    for line in table.summary(rows):
        typer.echo(line)
    if not all(row.met or row.known for row in rows):
        raise typer.Exit(1)


@app.command()
def preconditions(
    gpus: Annotated[int, typer.Option(help="GPUs that the gate needs; 0 for the CPU tier")] = 0,
    min_free_gib: Annotated[float, typer.Option(help="free memory of each GPU")] = 16.0,
    min_disk_gib: Annotated[float, typer.Option(help="free disk in FOLDER")] = 5.0,
    folder: Annotated[Path, typer.Option(help="where caches and report go")] = Path(),
    json_path: Annotated[Path | None, typer.Option("--json", help="write the rows there")] = None,
    machine_only: Annotated[bool, typer.Option(help="before anything is installed")] = False,
) -> None:
    """Checks what must hold before a GPU gate starts; exit code 3 if something does not."""
    from harness import preconditions as module

    try:
        code = module.main(
            gpus, min_free_gib, min_disk_gib, folder, json_path, machine_only=machine_only
        )
    except (ValueError, OSError) as error:
        raise _bad_input(str(error)) from error
    raise typer.Exit(code)


@app.command()
def canary(
    config: Annotated[Path | None, typer.Option(help="pytest settings to run it under")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the rows there")] = None,
) -> None:
    """Proves that a failing and a hanging test are seen; exit code 4 if they are not."""
    from harness import canary as module

    raise typer.Exit(module.main(json_path, config=config))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="-- PROGRAM ARGUMENTS...")],
    report: Annotated[Path, typer.Option(help="folder that a failure is written to")] = Path(
        "harness-report"
    ),
    perturb: Annotated[
        int | None, typer.Option(metavar="SEED", help="preempt threads at the hook points")
    ] = None,
    hooks: Annotated[
        bool,
        typer.Option("--hooks/--no-hooks", help="--no-hooks: dead threads and stuck state only"),
    ] = True,
    hang: Annotated[
        float, typer.Option(metavar="SECONDS", help="end it after this long stuck in a compile")
    ] = 0.0,
    unfix: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="take a repair of torch out first")
    ] = None,
) -> None:
    """Runs your own program, unedited, and writes a folder when its threads fail in a compile.

    Its exit code is the program's; 1 if that is 0 and something was found.
    """
    from harness import run as module

    request = module.Request(command, report, perturb, hooks, hang, unfix or ())
    try:
        code = module.run(request)
    except module.RunError as error:
        raise _bad_input(str(error)) from error
    raise typer.Exit(code)


@app.command()
def explain(
    folder: Annotated[Path, typer.Argument(help="left by a failure, of harness or dflash")],
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Says who died, of what, who held the state, and what to do; exit code 1 if anybody did."""
    from harness import explain as module

    console = Console()
    try:
        text, failed = module.show(
            folder, as_json=as_json, width=console.width, color=console.is_terminal
        )
    except module.ExplainError as error:
        raise _bad_input(str(error)) from error
    typer.echo(text)
    if failed:
        raise typer.Exit(1)


@app.command()
def explore(
    program: Annotated[str, typer.Argument(help="FILE:FUNCTION, which returns the threads' work")],
    bound: Annotated[int, typer.Option(help="most preemptions of one schedule")] = 2,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="for the search")] = 60.0,
    strategy: Annotated[str, typer.Option(help="preemptions, or pct")] = "preemptions",
    points: Annotated[
        list[str] | None, typer.Option(help="where threads may be switched; may be repeated")
    ] = None,
    unfix: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="take a repair of torch out first")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="look for this probe stuck, nothing else")
    ] = None,
    out: Annotated[Path, typer.Option(help="where the failing schedule goes")] = Path(
        "found.schedule"
    ),
) -> None:
    """Searches a program's schedules; exit code 1 unless it is clean to its bound."""
    from harness import search_command

    try:
        done = search_command.explore(
            program,
            bound=bound,
            budget=budget,
            strategy=strategy,
            points=points or (),
            unfix=unfix or (),
            state=state,
            out=out,
        )
    except (ValueError, search_command.IsolationError) as error:
        raise _bad_input(str(error)) from error
    typer.echo(done.text)
    raise typer.Exit(done.code)


@app.command()
def replay(
    schedule: Annotated[Path, typer.Argument(help="a schedule that a search or a test wrote")],
) -> None:
    """Runs a schedule once more; exit code 1 if it fails, or goes another way than recorded."""
    from harness import search_command

    try:
        done = search_command.replay(schedule)
    except (ValueError, search_command.IsolationError) as error:
        raise _bad_input(str(error)) from error
    typer.echo(done.text)
    raise typer.Exit(done.code)


@app.command()
def shrink(
    schedule: Annotated[Path, typer.Argument(help="a schedule that a search or a test wrote")],
    state: Annotated[
        str | None, typer.Option(metavar="PROBE", help="keep this one stuck, not the verdict")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="default: SCHEDULE with .small before its end")
    ] = (None),
) -> None:
    """Leaves switches out of a schedule as long as it fails in the same way."""
    from harness import search_command

    try:
        done = search_command.shrink(schedule, state=state, out=out)
    except (ValueError, search_command.IsolationError) as error:
        raise _bad_input(str(error)) from error
    typer.echo(done.text)
    raise typer.Exit(done.code)


@app.command()
def triage(
    logs: Annotated[
        list[str] | None, typer.Argument(help="logs, plain, .gz or .zst; - is standard input")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="go on at the log's end")] = False,
    idle: Annotated[float | None, typer.Option(help="end --follow after SECONDS of quiet")] = None,
    trace: Annotated[str | None, typer.Option(help="a TORCH_TRACE folder, to be joined")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="for an issue")] = False,
    as_sarif: Annotated[bool, typer.Option("--sarif", help="for a code scanner")] = False,
    as_github: Annotated[bool, typer.Option("--github", help="workflow annotations")] = False,
    as_grep: Annotated[bool, typer.Option("--grep", help="the search as a regex; no log")] = False,
) -> None:
    """Says from a log which torch it was, who died, of what; exit code 1 if something did."""
    from harness.triage import Unreadable, command

    asked = (as_json, as_markdown, as_sarif, as_github, as_grep)
    forms = [form for form, wanted in zip(command.FORMS, asked, strict=True) if wanted]
    if len(forms) > 1:
        raise _bad_input(f"--{forms[0]} and --{forms[1]} do not go together: name one form")
    try:
        code = command.run(
            logs or [], forms[0] if forms else None, follow=follow, idle=idle, trace=trace
        )
    except (Unreadable, ValueError) as error:
        raise _bad_input(str(error)) from error
    raise typer.Exit(code)


def main() -> None:
    """Entry point; a wrong command line too ends with one line and exit code 2."""
    try:
        code = app(prog_name="harness", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except typer.Abort:
        code = 1
    except Exception as error:
        # The class of a wrong command line is another one from version to version of typer.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if said := message():  # nothing: the help has been shown in its place
            typer.echo(f"error: {said.rstrip('.')}; see 'harness --help'", err=True)
        code = BAD_INPUT
    sys.exit(code)
