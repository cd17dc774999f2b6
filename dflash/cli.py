"""The command ``dflash``. So far: ``doctor``."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

BAD_INPUT = 2
OURS = "dflash-trainer"
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains DFlash drafters (block-diffusion draft models for speculative decoding).",
)


@app.callback()
def _commands() -> None:
    """Keeps ``doctor`` a subcommand while it is the only one."""


@app.command()
def doctor(
    guard: Annotated[str, typer.Option(help="the compile guard to look at")] = "auto",
) -> None:
    """Says which compile guard this torch gets and why, proves it, and looks at the packages."""
    import torch

    typer.echo(f"torch {torch.__version__}, python {sys.version.split()[0]}")
    problems = strangers()
    try:
        from dflash.compile import GuardError, StateError, UnsupportedTorch, compile_guard

        with compile_guard(guard) as protection:
            typer.echo(f"guard {protection.explanation}")
            typer.echo(f"guard {protection.prove()}")
    except UnsupportedTorch as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except (GuardError, StateError) as error:
        typer.echo(f"error: {error}", err=True)
        unknown = str(error).startswith("unknown guard")
        raise typer.Exit(BAD_INPUT if unknown else 1) from error
    for problem in problems:
        typer.echo(f"problem: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo("no other distribution shares the name 'dflash'")


def strangers() -> list[str]:
    """Other installed distributions with files in a package ``dflash``: theirs and ours would mix."""
    found = []
    for name in sorted(set(metadata.packages_distributions().get("dflash", ()))):
        if name != OURS:
            found.append(
                f"the distribution {name!r} also installs a package 'dflash', whose files mix with "
                f"ours: run 'pip uninstall {name}', then 'pip install --force-reinstall {OURS}'"
            )
    return found


def main() -> None:
    """Entry point."""
    try:
        app(prog_name="dflash")
    except KeyboardInterrupt:
        sys.exit(130)
