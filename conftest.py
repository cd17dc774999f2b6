"""Options and marks of the whole test suite. The ``race_*`` fixtures come from harness.plugin."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]  # for the tests of the plugin itself

_GPU_MARKS = {"gpu1": 1, "gpu8": 8}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpus",
        type=int,
        default=0,
        metavar="N",
        help="fail at once unless torch sees N GPUs, instead of skipping what needs them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if not config.pluginmanager.has_plugin("race"):
        pytest.exit("the plugin 'race' is not loaded: run 'pip install -e .[test]' first", 2)
    needed = config.option.require_gpus
    if needed > 0 and (found := _gpu_count()) < needed:
        pytest.exit(f"--require-gpus {needed}: torch sees {found} GPUs on this machine", 1)


@pytest.hookimpl(trylast=True)  # what -m leaves out needs no GPU to be counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark, needed in _GPU_MARKS.items():
            if item.get_closest_marker(mark) and _gpu_count() < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs ({mark})"))


@functools.cache
def _gpu_count() -> int:
    # In a process of its own: a test process that has touched a GPU must not fork.
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0
