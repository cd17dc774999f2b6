"""An option patched in one thread is read by another."""

from __future__ import annotations

import torch
from specimen import Shows, Specimen

SPECIMEN = Specimen(
    rows="3, 4, 41: pytorch#118260, #118387, #111150",
    state="dynamo-config",
    symptom="another thread compiles with options that it has not set",
    expect={"2.9": Shows("wrong number"), "2.12": Shows()},
    absent={"2.12": "options are context variables (pytorch#173568)"},
    schedule=(
        "thread-0 race_specimen_config_patch_of_another:inside@entry",
        "thread-1 end",
        "thread-0 end",
    ),
    points=("race_specimen_config_patch_of_another:inside@entry",),
    unfix=("thread-config",),
    unfixed=Shows("wrong number"),
    guarded=Shows("wrong number"),
)


def inside():
    pass


def program(compile):
    limit = torch._dynamo.config.recompile_limit

    def block():
        with torch._dynamo.config.patch(recompile_limit=limit + 1):
            inside()

    return [block, lambda: torch._dynamo.config.recompile_limit - limit]


def check(trial, results):
    trial.number("recompile_limit in thread-1, from its own", float(results[1]), 0.0)
