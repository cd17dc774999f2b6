"""The command ``dflash``. Exit codes: 0 good, 1 failed, 2 bad input, 130 and 143 after a signal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

BAD_INPUT = 2
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains DFlash drafters (block-diffusion draft models for speculative decoding).",
)
RecipePath = Annotated[Path, typer.Argument(help="a recipe (YAML); see recipes/")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="settings to change, as optimizer.learning_rate=1e-3")
]
RunFolder = Annotated[Path, typer.Argument(help="a run's folder")]
Output = Annotated[Path, typer.Option("--output", "-o", help="the run's folder")]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Bad input ends with one line and exit code 2, a failed run with one line and 1."""
    from dflash.checkpoint import CheckpointError
    from dflash.compile import GuardError, StateError, UnsupportedTorch
    from dflash.config import RecipeError
    from dflash.data import DataError
    from dflash.decode import DecodeError
    from dflash.export import ExportError
    from dflash.schedule.supervise import RunFailed
    from dflash.target.load import TargetError

    try:
        yield
    except RunFailed as error:
        typer.echo(f"error: {error}", err=True)
        if error.must_exit:
            # A worker is inside a compile or a device wait; the report is on disk.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        raise typer.Exit(1) from error
    except (
        CheckpointError,
        DataError,
        DecodeError,
        ExportError,
        RecipeError,
        TargetError,
        UnsupportedTorch,
    ) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except (GuardError, StateError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:  # a full disk, a folder that has gone
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def plan(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Checks everything that a run needs, without training, and says what it would do."""
    with _errors():
        from dflash.config import load_recipe
        from dflash.plan import make_plan

        lines, problems = make_plan(load_recipe(recipe, overrides or ()))
        for line in lines:
            typer.echo(line)
        for problem in problems:
            typer.echo(f"problem: {problem}", err=True)
        if problems:
            raise typer.Exit(1)


@app.command()
def train(
    recipe: RecipePath, overrides: Overrides = None, output: Output = Path("runs/run")
) -> None:
    """Trains a drafter; exports it and draws the curves at the end."""
    with _errors():
        from dflash.config import load_recipe

        _train(load_recipe(recipe, overrides or ()), output, resume=False)


@app.command()
def resume(folder: RunFolder, overrides: Overrides = None) -> None:
    """Goes on from a run's newest intact checkpoint, with its own recipe."""
    with _errors():
        from dflash.config import RecipeError, load_recipe
        from dflash.train import RECIPE_FILE

        if not (folder / RECIPE_FILE).exists():
            raise RecipeError(f"{folder}: is not a run (it has no {RECIPE_FILE})")
        _train(load_recipe(folder / RECIPE_FILE, overrides or ()), folder, resume=True)


def _warn(line: str) -> None:
    typer.echo(f"warning: {line}", err=True)


def _train(recipe: Any, folder: Path, *, resume: bool) -> None:
    from dflash.finish import export_run
    from dflash.report import draw_curves
    from dflash.train import train

    result = train(recipe, folder, resume=resume)
    if result.signal is not None:
        typer.echo(f"ended by signal {result.signal} after step {result.step}; checkpoint saved")
        raise typer.Exit(128 + result.signal)
    exported = export_run(folder, say=_warn)
    plot = draw_curves(folder)
    typer.echo(f"done: step {result.step}; drafter in {exported}; curves in {plot}")


@app.command("eval")
def evaluate(
    folder: RunFolder,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="file, folder or named source (stdlib:held_out); default: the recipe's held-out "
            "data; of plain files the beginning, middle and end, of JSONL each record"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    rule: Annotated[str, typer.Option(help="acceptance rule: match or rejection")] = "match",
    max_new_tokens: Annotated[int, typer.Option(help="per prompt")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="of the pieces of plain files", min=1)] = 64,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the numbers there")
    ] = None,
) -> None:
    """Decodes with and without drafts: tau, histogram, wall clock, and simulated acceptance."""
    with _errors():
        from dflash.config import RecipeError
        from dflash.report import evaluate_run

        if json_path is not None and (
            json_path.is_dir() or not json_path.absolute().parent.is_dir()
        ):
            raise RecipeError(f"--json {json_path}: name a file in a folder that exists")
        report = evaluate_run(
            folder,
            prompts,
            temperature=temperature,
            rule=rule,
            max_new_tokens=max_new_tokens,
            prompt_tokens=prompt_tokens,
        )
        for line in report.lines():
            typer.echo(line)
        if json_path is not None:
            json_path.write_text(json.dumps(report.to_json(), indent=1) + "\n")


@app.command()
def generate(
    folder: RunFolder,
    prompt: Annotated[str, typer.Argument(help="text to go on from")],
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    rule: Annotated[str, typer.Option(help="acceptance rule: match or rejection")] = "match",
    max_new_tokens: Annotated[int, typer.Option(help="at most")] = 128,
) -> None:
    """Goes on from a prompt, with drafts."""
    with _errors():
        from dflash.report import generate_text

        text, line = generate_text(
            folder, prompt, temperature=temperature, rule=rule, max_new_tokens=max_new_tokens
        )
        typer.echo(text)
        typer.echo(line, err=True)


@app.command()
def export(
    folder: RunFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="default: RUN/export")
    ] = None,
) -> None:
    """Writes the best (else the newest) checkpoint in the published format."""
    with _errors():
        from dflash.finish import export_run

        typer.echo(f"drafter in {export_run(folder, output, say=_warn)}")


@app.command()
def regenerate(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON lines, for data.train of any recipe")
    ] = Path("regenerated.jsonl"),
) -> None:
    """Lets the target write training text: it goes on from prompts out of data.train."""
    with _errors():
        from dflash.config import load_recipe
        from dflash.regenerate import regenerate_recipe

        tokens = regenerate_recipe(load_recipe(recipe, overrides or ()), output, say=typer.echo)
        typer.echo(f"{output}: {tokens} new tokens")


@app.command("make-tiny-target")
def make_tiny(
    folder: Annotated[Path, typer.Argument(help="where the model goes")],
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 320,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; the result depends on it", min=1)] = 1,
    resume: Annotated[bool, typer.Option(help="go on from what is in the folder")] = False,
) -> None:
    """Trains the small target that ships with the package, from the standard library's sources."""
    with _errors():
        from dflash.target.tiny import make_tiny_target

        make_tiny_target(folder, steps=steps, seed=seed, threads=threads, resume=resume)


@app.command()
def report(folder: RunFolder) -> None:
    """Writes RUN/report.html: curves, worker times, evaluations, and what a crash left."""
    from dflash.run_report import ReportError, write_run_report

    try:
        typer.echo(f"report in {write_run_report(folder)}")
    except ReportError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error


@app.command()
def doctor(
    guard: Annotated[str, typer.Option(help="the compile guard to look at")] = "auto",
) -> None:
    """Says which compile guard this torch gets and why, proves it, and looks at the packages."""
    import torch

    from dflash.compile import GUARDS, compile_guard
    from dflash.strangers import strangers

    if guard not in GUARDS:
        typer.echo(f"error: unknown guard {guard!r}: use one of {', '.join(GUARDS)}", err=True)
        raise typer.Exit(BAD_INPUT)
    typer.echo(f"torch {torch.__version__}, python {sys.version.split()[0]}")
    with _errors(), compile_guard(guard) as protection:
        typer.echo(f"guard {protection.explanation}")
        typer.echo(f"guard {protection.prove()}")
    problems = strangers()
    for problem in problems:
        typer.echo(f"problem: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo("no other distribution shares the name 'dflash'")


# Typer's base class of what a wrong command line raises, click's or its own copy of it.
_WrongCommandLine: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    """Entry point; a wrong option ends with one line and exit code 2."""
    try:
        code = app(prog_name="dflash", standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except _WrongCommandLine as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "dflash"
        message = " ".join(error.format_message().split()).removesuffix(".")
        if message:  # none: nothing was asked for, and the help has been shown
            typer.echo(f"error: {message}; see '{path} --help'", err=True)
        sys.exit(BAD_INPUT)
    sys.exit(code)
