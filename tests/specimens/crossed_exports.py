"""Two exports that cross fail, and leave torch believing that it compiles for ever."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="17 (the same flags); no public report of the stuck flag found",
    state="is-exporting",
    symptom="both fail, and is_compiling() is True in every thread for ever",
    expect={
        "2.9": Shows(
            "raised",
            raises={"thread-1": "Trying to pop empty mode stack"},
            stuck=(
                "dispatch-mode",
                "fx-tracing-flag",
                "is-compiling",
                "is-exporting",
                "make-fx-tracer",
                "module-call",
                "module-getattr",
            ),
            later={"is_compiling": True},
        ),
        "2.11": Shows(
            "raised",
            raises={
                "thread-0": "We found a fake tensor in the exported program constant's list",
                "thread-1": "Trying to pop empty mode stack",
            },
            stuck=(
                "fx-tracing-flag",
                "is-compiling",
                "is-exporting",
                "make-fx-tracer",
                "module-call",
                "module-getattr",
                "traceback-meta",
            ),
            later={"is_compiling": True},
        ),
        "2.14": Shows(
            "raised",
            raises={
                "thread-0": "We found a fake tensor in the exported program constant's list",
                "thread-1": "Trying to pop empty mode stack",
            },
            stuck=(
                "is-compiling",
                "is-exporting",
                "make-fx-tracer",
                "module-call",
                "module-getattr",
                "traceback-meta",
            ),
            later={"is_compiling": True},
        ),
    },
    schedule=(
        "thread-0 race_specimen_crossed_exports:inside@entry",
        "thread-1 race_specimen_crossed_exports:inside@entry",
        "thread-0 end",
        "thread-1 end",
    ),
    points=("race_specimen_crossed_exports:inside@entry",),
    guarded={
        "2.9": Shows(
            "raised",
            raises={"thread-1": "AssertionError"},
            stuck=("dispatch-mode",),
            refused=True,
        ),
        "2.11": Shows(
            "raised",
            raises={"thread-1": "_EXPORT_MODULE_HIERARCHY must not be None"},
            refused=True,
        ),
    },
)


def inside():
    pass


class Module(torch.nn.Module):
    def forward(self, x):
        inside()
        return x + 1


def program(compile):
    def export():
        torch.export.export(Module(), (torch.ones(2),), strict=False)

    return [export, export]


def afterwards():
    return {"is_compiling": torch.compiler.is_compiling()}
