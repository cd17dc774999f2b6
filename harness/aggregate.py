"""Turns the results of all jobs of the gate into the one status that branch protection requires.

Covers: every job that the gate is made of must have succeeded. Failed, cancelled, timed out,
skipped, missing and unknown results fail. The single exception: the GPU job may be skipped when
the filter job said in writing that no GPU tier is wanted.

Does not cover: why a job failed (its own log and report say that). Uses the standard library
only, so that it runs from a bare checkout.

Environment of the command: NEEDS is the `needs` context of the workflow as JSON, GPU_WANTED is
`true` or `false`. Exit codes: 0 passed, 1 failed, 2 NEEDS cannot be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

FILTER, GPU = "filter", "gpu"
# A job that is dropped from `needs` would otherwise stop being required without a word.
REQUIRED = (FILTER, "cpu", GPU)


def decide(needs: Mapping[str, Any], gpu_wanted: bool) -> tuple[bool, list[str]]:
    """Whether the gate passes, and one line for each job, in the order of the workflow."""
    why = _result(needs, FILTER, "outputs", "why") or "the filter gave no reason"
    passes, lines = True, []
    for job in dict.fromkeys((*REQUIRED, *needs)):
        result = _result(needs, job, "result") or "not among the jobs that the gate needs"
        if result == "success":
            ok, line = True, f"{job}: success"
        elif job == GPU and result == "skipped" and not gpu_wanted:
            # Only a filter that has itself succeeded can have said so.
            ok = _result(needs, FILTER, "result") == "success"
            line = f"{job}: skipped, no GPU tier is wanted ({why})"
        elif job == GPU and result == "skipped":
            ok, line = False, f"{job}: skipped, but the GPU tier is wanted ({why})"
        else:
            ok, line = False, f"{job}: {result}; open this job's log and report"
        passes = passes and ok
        lines.append(f"{'ok  ' if ok else 'FAIL'}  {line}")
    return passes, lines


def _result(needs: Mapping[str, Any], *path: str) -> str | None:
    value: Any = needs
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) and value else None


def main(environ: Mapping[str, str] = os.environ) -> int:
    text = environ.get("NEEDS", "")
    try:
        needs = json.loads(text)
    except ValueError as error:
        needs, problem = None, str(error)
    else:
        problem = f"an object was expected, not {type(needs).__name__}"
    if not isinstance(needs, dict):
        print(f"NEEDS: {problem}; pass the workflow's needs context as JSON")
        return 2
    # Anything but a clear "false" (a filter that died leaves it empty) means: wanted.
    passes, lines = decide(needs, gpu_wanted=environ.get("GPU_WANTED", "").strip() != "false")
    lines.append(f"gate: {'passed' if passes else 'failed'}")
    print("\n".join(lines))
    if environ.get("GITHUB_STEP_SUMMARY"):
        with open(environ["GITHUB_STEP_SUMMARY"], "a", encoding="utf-8") as summary:
            summary.write("```\n" + "\n".join(lines) + "\n```\n")
    return 0 if passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
