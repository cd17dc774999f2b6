"""An annotation of one thread lands on the nodes of another thread's graph."""

from __future__ import annotations

import torch
import torch.fx.traceback
from specimen import Shows, Specimen
from torch.fx.experimental.proxy_tensor import make_fx

SPECIMEN = Specimen(
    rows="12: pytorch#184917",
    state="traceback-meta",
    symptom="nodes carry metadata that their program never wrote",
    expect={"2.11": Shows("wrong number")},
    schedule=("thread-0 annotate.body", "thread-1 end", "thread-0 end"),
)


def program(compile):
    def annotated():
        with torch.fx.traceback.annotate({"stage": 0}):
            pass

    def trace():
        with torch.fx.traceback.preserve_node_meta():
            return make_fx(lambda x: x.sin() * 2)(torch.ones(2))

    return [annotated, trace]


def check(trial, results):
    marked = sum("custom" in node.meta for node in results[1].graph.nodes)
    trial.number("nodes of thread-1 with thread-0's annotation", float(marked), 0.0)
