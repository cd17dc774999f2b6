"""What a worker's thread sets for itself before its first packet."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from dflash.config import make_recipe
from dflash.schedule import Place
from dflash.train import _Run


@pytest.mark.parametrize(("name", "expected"), [("cuda:5", ["cuda:5"]), ("cpu:5", [])])
def test_a_workers_thread_has_its_own_gpu_as_the_current_one(monkeypatch, name, expected):
    """A new thread's is the first one, whatever the worker's tensors are on."""
    chosen, threads = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    tree = {"data": {"train": ["a"]}, "run": {"steps": 1}, "schedule": {"threads_per_worker": 2}}
    run = SimpleNamespace(recipe=make_recipe(tree))

    def body():
        _Run._settle(run, Place("drafter-0", name))
        threads.append(torch.get_num_threads())

    worker = threading.Thread(target=body)
    worker.start()
    worker.join(60)
    assert chosen == expected and threads == [2]
