"""Which stream does what, and in which order; on a CPU with recorded streams, on a GPU for real."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from dflash import transfer


class Tape:
    """Stands for torch.cuda and for a tensor on a GPU; writes down what is asked of them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = {"cuda:0": "main0", "cuda:1": "main1"}

    def stream_named(self, name: str):
        tape = self

        class Stream:
            def wait_stream(self, other):
                tape.said.append(f"{name} waits for {other.name}")

            def wait_event(self, event):
                tape.said.append(f"{name} waits for the event on {event.on}")

        stream = Stream()
        stream.name = name
        return stream

    def features(self, device: str, moved: bool = False):
        tape = self

        class Features:
            def to(self, where, non_blocking=False):
                tape.said.append(f"copy to {where} on {sorted(tape.current.values())}")
                assert non_blocking == (where.type == "cuda")
                return tape.features(str(where), moved=True)

            def record_stream(self, stream):
                what = "the copy" if moved else "the original"
                tape.said.append(f"{what} is used on {stream.name}")

        found = Features()
        found.device = torch.device(device)
        return found


@pytest.fixture
def tape(monkeypatch):
    tape = Tape()

    class Event:
        on = ""

        def record(self, stream):
            self.on = stream.name
            tape.said.append(f"event on {stream.name}")

        def synchronize(self):
            tape.said.append("the host waits")

    @contextlib.contextmanager
    def stream(side):
        device = side.name.replace("side", "cuda:")
        before, tape.current[device] = tape.current[device], side.name
        yield
        tape.current[device] = before

    monkeypatch.setattr(transfer, "_streams", threading.local())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: tape.stream_named(f"side{device.index}")
    )
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: tape.stream_named(tape.current[str(device)])
    )
    return tape


def test_features_cross_on_side_streams_and_the_reader_waits_for_them(tape):
    there = torch.device("cuda", 1)
    moved, ready = transfer.send(tape.features("cuda:0"), there)
    transfer.receive(moved, ready, there)
    assert tape.said == [
        "side0 waits for main0",
        "copy to cuda:1 on ['side0', 'side1']",
        "event on side1",
        "the original is used on side0",
        "main1 waits for the event on side1",
        "the copy is used on main1",
    ]


def test_on_one_gpu_nothing_is_copied(tape):
    here = torch.device("cuda", 0)
    features = tape.features("cuda:0")
    moved, ready = transfer.send(features, here)
    assert moved is features
    transfer.receive(moved, ready, here)
    assert tape.said == [
        "event on main0", "main0 waits for the event on main0", "the original is used on main0"
    ]  # fmt: skip


def test_from_a_gpu_to_the_cpu_the_host_waits_for_the_event(tape):
    cpu = torch.device("cpu")
    transfer.receive(*transfer.send(tape.features("cuda:0"), cpu), cpu)
    assert tape.said[-1] == "the host waits"


def test_on_the_cpu_there_is_nothing_to_do():
    features = torch.ones(2)
    moved, ready = transfer.send(features, torch.device("cpu"))
    assert moved is features and ready is None
    assert transfer.receive(moved, ready, torch.device("cpu")) is features
