"""What the next run says of a damaged compile cache, and of one that others use at the same time.

One cold compile by Inductor fills a folder; each case damages a copy of it. Whatever happens, the
numbers must be right or the run must fail: a wrong number out of a damaged cache is never allowed.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cache_case

from harness.explore import PRELOADED
from harness.isolate import CaseResult, Isolation

MEASURED = version("torch").startswith("2.13.")
HIT = {"aot hit": 1, "aot miss": 0, "graph hit": 1, "graph miss": 0}
UNREADABLE = "fx graph cache unable to load compiled graph"


@pytest.fixture(scope="module")
def warm(isolation, tmp_path_factory) -> Path:
    """A folder as one complete run leaves it."""
    folder = tmp_path_factory.mktemp("cache") / "warm"
    told = run(isolation, folder)
    assert told["raised"] == "" and told["counts"]["aot saved"] == 1
    return folder


@pytest.fixture
def folder(warm, tmp_path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(warm, tmp_path / "cache"))


def run(isolation: Isolation, folder: Path, **options: Any) -> dict[str, Any]:
    result = start(isolation, folder, **options)
    assert result.ended == "returned", result.error or result.what
    told: dict[str, Any] = result.value
    if not told["raised"]:
        assert told["difference"] < 1e-6
    return told


def start(isolation: Isolation, folder: Path, **options: Any) -> CaseResult:
    arguments = {"folder": str(folder), **options}
    return isolation.run(cache_case.compile_once, arguments, deadline=200, label="cache")


def entries(folder: Path, pattern: str) -> list[Path]:
    found = [path for path in folder.glob(pattern) if path.is_file()]
    assert found, f"no {pattern} in the cache"
    return found


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def stub(content: bytes) -> bytes:
    """Its header alone: what the loader needs is in the first half of a library."""
    return content[:1000]


def empty(_content: bytes) -> bytes:
    return b""


def garbage(content: bytes) -> bytes:
    return bytes(255 - byte for byte in content)


AOT, GRAPH = "aotautograd/**/*", "fxgraph/**/*"
AOT_MISS = {"aot hit": 0, "aot miss": 1, "graph hit": 1}
GRAPH_MISS = {"aot hit": 0, "aot miss": 1, "graph hit": 0, "graph miss": 2}


def test_an_intact_cache_is_used(isolation, folder):
    """The control: without damage nothing is compiled; lock files lie about, and harm nobody."""
    assert entries(folder, "locks/*.lock")
    told = run(isolation, folder)
    assert told["counts"].items() >= HIT.items() and told["told"] == [] and told["raised"] == ""


@pytest.mark.parametrize("damage", [cut, empty, garbage])
@pytest.mark.parametrize(
    ("pattern", "counts"), [(AOT, AOT_MISS), (GRAPH, GRAPH_MISS)], ids=["aotautograd", "fxgraph"]
)
def test_a_damaged_entry_is_a_miss(isolation, folder, pattern, counts, damage):
    """The next run warns, compiles, and stores a good one."""
    for path in entries(folder, pattern):
        path.write_bytes(damage(path.read_bytes()))
    told = run(isolation, folder)
    assert told["raised"] == ""
    if MEASURED:
        assert told["counts"].items() >= counts.items()
        assert set(told["told"]) == {UNREADABLE}
    assert run(isolation, folder)["counts"].items() >= HIT.items(), "it was not repaired"


def test_a_damaged_source_fails_every_run(isolation, folder):
    """What the entries point to is trusted: the run dies, and so does the next one."""
    for path in entries(folder, "*/*.py"):
        path.write_bytes(cut(path.read_bytes()))
    for _ in range(2):
        told = run(isolation, folder)
        assert "BackendCompilerFailed" in told["raised"]
        if MEASURED:
            assert "SyntaxError" in told["raised"]


def test_a_damaged_library_kills_every_run(isolation, folder):
    """The same for the compiled half of the entry, without a traceback: SIGBUS in the loader."""
    for path in entries(folder, "*/*.main.so"):
        path.write_bytes(stub(path.read_bytes()))
    for _ in range(2):
        result = start(isolation, folder)
        assert result.ended == "signal" or "BackendCompilerFailed" in result.value["raised"]
        if MEASURED:
            assert result.what == "died by SIGBUS"


@pytest.mark.parametrize("below", ["aotautograd", "fxgraph"])
def test_a_run_that_is_killed_while_it_writes(isolation, folder, below):
    """It leaves a file that nobody reads, and nobody removes."""
    for name in ("aotautograd", "fxgraph"):
        shutil.rmtree(folder / name)
    assert start(isolation, folder, kill_at=below).ended == "signal"
    told = run(isolation, folder)
    assert told["raised"] == "" and told["counts"]["aot saved"] == 1
    assert len(told["left"]) == 1
    again = run(isolation, folder)
    assert again["counts"].items() >= HIT.items() and again["left"] == told["left"]


@contextmanager
def held(locks: list[Path]) -> Iterator[None]:
    """Another process's hold on lock files: flock is per open file, so this one's will do."""
    files = [path.open("w") for path in locks]
    try:
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        for file in files:
            file.close()


def test_a_lock_that_somebody_holds_is_waited_for(isolation, folder):
    """A hung worker holds it: the others fail after ``TORCHINDUCTOR_FILE_LOCK_TIMEOUT``."""
    for path in entries(folder, "*/*.main.so"):
        path.unlink()
    with held(entries(folder, "locks/*.lock")):
        told = run(isolation, folder, lock_patience=1)
    assert "could not be acquired" in told["raised"]
    told = run(isolation, folder, lock_patience=1)
    assert told["raised"] == "", "the lock file is there, and nobody holds it"


def test_aot_entries_that_another_worker_clears_during_a_lookup(isolation, folder):
    """A miss."""
    told = run(isolation, folder, clear="aotautograd")
    assert told["raised"] == "" and told["counts"]["aot miss"] == 1
    assert run(isolation, folder)["counts"].items() >= HIT.items()


def test_graph_entries_that_another_worker_clears_during_a_lookup(isolation, folder):
    """pytorch#196189: the compile dies; the next one is well."""
    shutil.rmtree(folder / "aotautograd")
    told = run(isolation, folder, clear="fxgraph")
    if MEASURED:
        assert "BackendCompilerFailed" in told["raised"] and "FileNotFoundError" in told["raised"]
    assert run(isolation, folder)["raised"] == ""


def test_two_workers_compile_into_one_folder(isolation, folder):
    """Both write all entries at the same time; both are right, and so is who comes after."""
    for name in ("aotautograd", "fxgraph"):
        shutil.rmtree(folder / name)
    with Isolation(preload=PRELOADED) as second:
        told: dict[str, dict[str, Any]] = {}
        work: dict[str, Callable[[], object]] = {
            "first": lambda: told.update(first=run(isolation, folder)),
            "second": lambda: told.update(second=run(second, folder)),
        }
        threads = [threading.Thread(target=one, name=name) for name, one in work.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(250)
    assert told.keys() == work.keys(), "a worker did not end well"
    assert all(one["raised"] == "" for one in told.values())
    after = run(isolation, folder)
    assert after["counts"].items() >= HIT.items() and after["left"] == []
