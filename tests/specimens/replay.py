"""Runs one specimen and prints what it showed, or the same run changed.

    python tests/specimens/replay.py NAME [--runs N] [--unfix] [--guard auto] [--in-turn]
    python tests/specimens/replay.py NAME --counterfactual [--runs N]
    python tests/specimens/replay.py --all

Exit code 0: as the specimen states; 1: not so (with ``--guard`` or ``--in-turn``: something was
found); 2: no such specimen.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter as Tally
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import specimen_case
from specimen import facts, names

from harness.cause import Count, Counterfactual
from harness.explore import PRELOADED
from harness.isolate import Isolation
from harness.verdict import Verdict, findings, judge


def run(name: str, isolation: Isolation, **options: Any) -> dict[str, Any]:
    """One run of a specimen in a fresh process."""
    arguments = {"name": name, "unfix": [], **options}
    return isolation.run(specimen_case.run, arguments, deadline=90, label=name).record()


def counterfactual(name: str, runs: int, isolation: Isolation) -> Counterfactual:
    """The specimen as it is, its threads in turn, and free with one lock for all of them."""
    unfix = facts(name).unfix_here(version("torch"))
    as_it_is, swapped, locked = (
        [run(name, isolation, unfix=unfix, **change) for _ in range(runs)]
        for change in ({}, {"order": "in turn"}, {"order": "locked"})
    )
    causes = tuple(dict.fromkeys(e["text"] for r in as_it_is for e in r.get("cause", ())))
    return Counterfactual(_count(as_it_is), _count(swapped), _count(locked), causes[:1])


def _count(records: list[dict[str, Any]]) -> Count:
    verdicts = Tally(str(judge(record)) for record in records)
    missed = sum(record.get("script", {}).get("missed") is not None for record in records)
    return Count(len(records), len(records) - verdicts["completed"], missed, dict(verdicts))


def tell(record: dict[str, Any]) -> None:
    """The verdict and everything behind it."""
    print(f"verdict: {judge(record)}")
    for finding in findings(record):
        print(f"  {finding}")
    for line in record.get("cause", ()):
        print(f"  cause: {line['text']}")
    if (missed := record.get("script", {}).get("missed")) is not None:
        print(f"  the schedule was not followed: {missed}")
    for fact in record.get("later", {}).items():
        print("  afterwards {}: {}".format(*fact))


def main() -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=names(), metavar="NAME")
    parser.add_argument("--all", action="store_true", help="all specimens, a line each")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--unfix", action="store_true", help="take torch's repair out first")
    parser.add_argument("--guard", default="", help="under this guard of dflash")
    parser.add_argument("--in-turn", action="store_true", help="the threads one after the other")
    parser.add_argument("--counterfactual", action="store_true")
    options = parser.parse_args()
    if options.all == (options.name is not None):
        parser.error("give one specimen's name or --all")
    with Isolation(preload=(*PRELOADED, "dflash.compile")) as isolation:
        if options.counterfactual:
            shown = counterfactual(options.name, options.runs, isolation)
            print("\n".join(shown.lines()))
            return 0 if shown.shown else 1
        return max(
            _told(name, options, isolation) for name in (options.name and [options.name]) or names()
        )


def _told(name: str, options: argparse.Namespace, isolation: Isolation) -> int:
    specimen = facts(name)
    change: dict[str, Any] = {"order": "in turn"} if options.in_turn else {}
    if options.guard:
        change["guard"] = options.guard
    if options.unfix:
        change["unfix"] = list(specimen.unfix)
    elif options.guard:
        change["unfix"] = specimen.unfix_here(version("torch"))
    worst = 0
    for _ in range(options.runs):
        record = run(name, isolation, **change)
        seconds = record["process"]["seconds"]
        if options.all:
            print(f"{name:34} {judge(record)!s:20} {seconds:5.1f} s", flush=True)
        if not options.all or options.runs == 1:
            tell(record)
            if record["process"]["ended"] != "returned":
                print(record["process"]["error"] or record["process"]["what"])
        if change and not options.unfix:
            worst = max(worst, judge(record) is not Verdict.COMPLETED)
        else:
            wanted = (
                specimen.unfixed
                if options.unfix
                else specimen.expected(record["torch"])
                if "torch" in record
                else None
            )
            for line in wanted.unmet(record) if wanted else []:
                print(f"  NOT AS STATED: {line}")
                worst = 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
