"""Distances of nested numbers, snapshots that do not change afterwards, stacks of all threads."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import stacks
from harness.reference import largest_difference, snapshot

NAN = math.nan


@pytest.mark.parametrize(
    ("got", "reference", "difference"),
    [
        (torch.ones(2), torch.ones(2), 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), 3.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), 0.0),
        (torch.tensor([NAN]), torch.tensor([NAN]), 0.0),
        (torch.ones(0), torch.ones(0), 0.0),
        ({"a": [1.0, torch.ones(1)]}, {"a": [1.0, torch.zeros(1)]}, 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0),
        (torch.tensor([1 + 1j]), torch.tensor([1.0]), 1.0),
        ((1, 2.5), (1, 2.0), 0.5),
        (NAN, NAN, 0.0),
        (-math.inf, -math.inf, 0.0),
        (None, None, 0.0),
        ("sum", "sum", 0.0),
    ],
)
def test_the_largest_difference_is_found_however_deep(
    got: Any, reference: Any, difference: float
) -> None:
    assert largest_difference(got, reference) == difference


@pytest.mark.parametrize(
    ("got", "reference"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), [1.0, 1.0]),
        (torch.tensor([NAN]), torch.tensor([1.0])),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        ([5.0, NAN, 7.0], [0.0, 1.0, 0.0]),
        (1.0, NAN),
        (None, torch.ones(1)),
        ("sum", "mean"),
    ],
)
def test_what_cannot_be_compared_is_never_close(got: Any, reference: Any) -> None:
    assert math.isnan(largest_difference(got, reference))


def test_a_snapshot_is_the_step_s_and_stays_so() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(torch.ones(3, 2))
    output.sum().backward()
    optimizer.step()
    taken = snapshot(output, model, optimizer)
    assert taken.keys() == {"output", "gradients", "parameters", "optimizer"}
    assert largest_difference(taken, snapshot(output, model, optimizer)) == 0.0
    output.sum().detach()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    later = snapshot(output, model, optimizer)
    assert largest_difference(taken["output"], later["output"]) == 0.0
    for part in ("gradients", "parameters", "optimizer"):
        assert largest_difference(taken[part], later[part]) > 0, part


# -- stacks --------------------------------------------------------------------------------------


def test_every_thread_has_its_stack_under_its_name() -> None:
    here, go_on = threading.Event(), threading.Event()

    def parked_in_the_test() -> None:
        here.set()
        go_on.wait(20)

    thread = threading.Thread(target=parked_in_the_test, name="parked")
    thread.start()
    assert here.wait(10)
    try:
        found = stacks.python_stacks()
    finally:
        go_on.set()
        thread.join()
    assert "parked_in_the_test" in [frame["function"] for frame in found["parked"]]
    assert found["MainThread"][-1]["function"] == "python_stacks" or "test_every" in str(
        found["MainThread"]
    )


def test_two_threads_of_one_name_have_a_stack_each() -> None:
    go_on = threading.Event()
    threads = [threading.Thread(target=go_on.wait, args=(20,), name="twin") for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = stacks.python_stacks()
    finally:
        go_on.set()
    numbers = [name.partition(" ")[2] for name in found if name.startswith("twin")]
    assert len(numbers) == 2 and "" in numbers
    assert max(numbers) in [f"({thread.ident})" for thread in threads]


def _program(folder: Path, text: str) -> None:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('echo "Thread 1 $2 $3"', "Thread 1 --native --pid\n"),
        ("echo no permission >&2; exit 1", "no C stacks: py-spy failed: no permission"),
        ("exit 3", "no C stacks: py-spy failed: exit code 3"),
        ("exec sleep 60", "no C stacks: py-spy failed: Command"),
    ],
    ids=["works", "refused", "silent", "hangs"],
)
def test_native_stacks_are_those_of_py_spy_or_say_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, said: str
) -> None:
    _program(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(stacks, "_LIMIT", 2.0)
    assert stacks.native_stacks().startswith(said)


def test_without_py_spy_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stacks.native_stacks() == "no C stacks: py-spy is not installed"
