"""The race suite's own option, and its refusal of a torch that nobody has run it on."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--dflash-guard",
        action="append",
        metavar="NAME",
        help="run the guard cases for this guard only (may be given several times)",
    )


def pytest_configure(config: pytest.Config) -> None:
    from dflash.compile import GUARDS, UnsupportedTorch
    from dflash.compile.versions import require_supported

    try:
        require_supported(version("torch"))
    except UnsupportedTorch as error:
        pytest.exit(str(error), 2)
    for name in config.option.dflash_guard or ():
        if name not in GUARDS:
            pytest.exit(f"--dflash-guard: unknown guard {name!r}: use {', '.join(GUARDS)}", 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "guard" in metafunc.fixturenames:
        from facts import guards_here

        chosen = metafunc.config.option.dflash_guard
        metafunc.parametrize(
            "guard", [name for name in guards_here() if not chosen or name in chosen]
        )


def pytest_report_header() -> str:
    from facts import describe

    return describe()
