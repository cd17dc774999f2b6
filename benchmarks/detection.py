"""How often each tool finds a race that is there: detection rates on the same bodies.

    python benchmarks/detection.py [--runs 20] [--tool NAME] [--body NAME] [--deadline 60]

A run is a fresh process. A run is *detected* when the tool reports the race's own failure; any
other red is an *other failure* (a false alarm, or damage that the tool did itself). *hung*: the
tool gave up on a thread that did not come back, or had to be killed. *out of time*: it was still
searching at the deadline. *missed*: it said nothing, or green; *left* counts the runs among these
that left nn.Module patched. Seconds are without the import of torch, frontrun's with it: it has
to patch the locks before torch makes its own; `explore` with the run that confirms its finding.

What each tool is given. ``barrier``: one pass of the body, all threads released together;
``barrier + interval`` the same under ``sys.setswitchinterval(1e-6)``. ``pytest-run-parallel``:
one pass, thread i runs the body's i-th part. ``interleave-test`` and ``frontrun`` search until
the deadline, and are told in which files the race is (line by line, ``include=``, or
``trace_packages=``). ``explore`` searches until the deadline too; it is told nothing, but for
Triton, where the harness has no points of its own on the way, the same file. ``scripted`` is
given the order, so it is no search: what it says is whether forcing works every time.

The Triton body runs the real ``triton.runtime.autotuner.Autotuner`` on a kernel and a benchmark
that are stand-ins, so it needs no GPU. Needs Python 3.12 for interleave-test and a torch that has
the first race (below 2.13). Exit code 1 when ``scripted`` is not n of n.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "harness"))

Threads = list[Callable[[], object]]

DETECTED, OTHER, HUNG, UNSURE, MISSED = (
    "detected",
    "other failure",
    "hung",
    "inconclusive",
    "missed",
)
INTERVAL = 1e-6  # seconds, as pytest-run-parallel sets it
SCHEDULES = 100_000  # more than fit into any deadline
TUNER = "triton.runtime.autotuner:Autotuner.run"


@dataclass(frozen=True)
class Body:
    """One racing program, and what its race looks like.

    Attributes:
        program: a function of this file that returns what each thread runs.
        says: a regular expression for the messages of the race's own failures.
        script: the order that forces it.
        files: where the race is, as a path below site-packages.
        parts: how many threads it has.
        points: for ``explore``, or () for the harness's own.
        needs: packages without which the body cannot run.
    """

    program: str
    says: str
    script: tuple[str, ...]
    files: tuple[str, ...]
    parts: int = 2
    points: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def original() -> Threads:
    """The original failure: warm compiled calls in two threads, a recompile in the third."""
    import programs

    return programs.warm_beside_recompile(warm=True)


def compile_make_fx() -> Threads:
    """One thread compiles, the other traces with make_fx."""
    import programs

    return programs.compile_beside_trace()


def autotuned() -> Threads:
    """triton#11494: two threads run one autotuned kernel for the first time."""
    from triton.runtime.autotuner import Autotuner, Config

    class Kernel:
        """A stand-in for a JITFunction."""

        def __init__(self) -> None:
            self.fn = lambda x, n: None

        def run(self, *args: object, **meta: object) -> None:
            return None

    def bench(call: Callable[[], object], quantiles: object) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    configs = [Config({"BLOCK": 16}), Config({"BLOCK": 32})]
    tuner = Autotuner(Kernel(), ["x", "n"], configs, ["n"], None, None, do_bench=bench)
    return [lambda: tuner.run(1, 64), lambda: tuner.run(1, 64)]


FX_FILES = ("torch/fx", "torch/_dynamo/eval_frame.py")
BODIES = {
    "original": Body(
        "original",
        "FX to symbolically trace",
        (
            "thread-1 trace.body",
            "thread-0 call.arrive",
            "thread-0 call.settled",
            "thread-2 call.arrive",
            "thread-2 call.settled",
            "thread-1 trace.end",
        ),
        FX_FILES,
        parts=3,
    ),
    "compile x make_fx": Body(
        "compile_make_fx",
        "CURRENT_PATCHER|FX to symbolically trace|not installed as a submodule",
        (
            "thread-0 trace.body",
            "thread-1 trace.begin",
            "thread-1 trace.body",
            "thread-0 trace.left",
            "thread-1 trace.end",
        ),
        FX_FILES,
    ),
    "triton autotuner": Body(
        "autotuned",
        "NoneType",
        (
            f"thread-0 {TUNER}@line:/^used_cached_result = True/",
            "thread-1 triton.autotuned",
            f"thread-0 {TUNER}@line:/^all_args = /",
        ),
        ("triton/runtime/autotuner.py",),
        points=("step.begin", "triton/runtime/autotuner.py:*"),
        needs=("triton",),
    ),
}


# -- in the fresh process ------------------------------------------------------------------------


@dataclass
class Said:
    """What a tool reported: red or green, and its words."""

    red: bool
    text: str = ""
    hung: bool = False
    unsure: bool = False


def ready() -> None:
    """The server is there."""


def attempt(*, tool: str, body: str, seed: int, seconds: float) -> dict[str, Any]:
    """One run of one tool; plain data."""
    begun = time.monotonic()
    said = CHILD_TOOLS[tool](BODIES[body], seed, seconds)
    took = time.monotonic() - begun
    import torch

    patched = "module_call_wrapper" in torch.nn.Module.__call__.__code__.co_qualname
    return {**vars(said), "seconds": took, "patched": patched}


def program_of(body: Body) -> Threads:
    """The body's parts, made anew: dynamo has compiled nothing for them yet."""
    import torch._dynamo

    torch._dynamo.reset()
    return globals()[body.program]()


def barrier(body: Body, seed: int, seconds: float) -> Said:
    """Plain threads behind a barrier."""
    parts = program_of(body)
    together = threading.Barrier(len(parts))
    errors: list[str] = []

    def work(part: Callable[[], object]) -> None:
        together.wait()
        try:
            part()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # a deadlock ends at the process's deadline
    return Said(bool(errors), "\n".join(errors))


def barrier_interval(body: Body, seed: int, seconds: float) -> Said:
    """The same, with threads switched as often as Python can."""
    sys.setswitchinterval(INTERVAL)
    return barrier(body, seed, seconds)


def run_parallel(body: Body, seed: int, seconds: float) -> Said:
    """A test that pytest-run-parallel runs in as many threads as the body has parts."""
    count = body.parts
    text = f"PARTS = detection.{body.program}()\n\ndef test_body(thread_index):\n"
    text += "    PARTS[thread_index]()\n"
    return run_pytest(text, f"--parallel-threads={count}", "-p", "no:frontrun", parallel=True)


def frontrun(body: Body, seed: int, seconds: float) -> Said:
    """Its default, dynamic partial order reduction."""
    return frontrun_test(body, seconds)


def frontrun_random(body: Body, seed: int, seconds: float) -> Said:
    """Random schedules."""
    # It advises more operations than its 300 where a schedule of a body is longer.
    options = {"strategy": "random", "seed": seed, "max_attempts": SCHEDULES, "max_ops": 100_000}
    return frontrun_test(body, seconds, **options)


def frontrun_test(body: Body, seconds: float, **options: Any) -> Said:
    """A test that calls frontrun.explore, with locks patched before torch is imported."""
    given = {
        "trace_packages": [pattern_of(file) for file in body.files],
        "total_timeout": seconds,
        # What frontrun advises when a schedule of these bodies takes longer than its default.
        "timeout_per_run": seconds,
        "deadlock_timeout": seconds / 2,
        **options,
    }
    text = f"""
import frontrun
import torch  # with the locks patched

def test_body():
    frontrun.explore(
        setup=lambda: detection.program_of(detection.BODIES[{name_of(body)!r}]),
        workers=[lambda parts, i=i: parts[i]() for i in range({body.parts})],
        invariant=lambda parts: True,
        **{given!r},
    ).assert_holds()
"""
    return run_pytest(text, "--frontrun-patch-locks", "-p", "no:run-parallel")


def interleave(body: Body, seed: int, seconds: float) -> Said:
    """interleave_test.explore with PCT, line by line in the race's files."""
    import interleave_test as it

    def model() -> None:
        with it.no_interleave():
            parts = program_of(body)
        tasks = [it.spawn(part) for part in parts]
        for task in tasks:
            task.join()

    site = Path(importlib.util.find_spec(body.files[0].partition("/")[0]).origin).parents[1]
    try:
        it.explore(
            model,
            iterations=SCHEDULES,
            seed=seed,
            strategy="pct",
            granularity="line",
            include=[str(site / file) for file in body.files],
            timeout=seconds / 2,
            # Its own Thread breaks threading.current_thread(), which dynamo's logging calls.
            patch_modules=False,
        )
    except it.InterleaveError as error:
        hung = isinstance(error, it.HangError | it.DeadlockError)
        return Said(True, str(error), hung=hung)
    return Said(False)


def scripted(body: Body, seed: int, seconds: float) -> Said:
    """The harness: one order, forced."""
    from harness.schedule import Script
    from harness.trial import Trial

    with Trial(script=Script(body.script), interval=0) as trial:
        parts = program_of(body)

        def work(member: Any) -> None:
            with member.step(0):
                parts[member.index]()

        trial.run(len(parts), work, start="together", name="thread", deadline=seconds)
    record = trial.record(canaries=False)
    if (missed := record["script"]["missed"]) is not None:
        return Said(False, f"script missed: {missed}")
    return said_of(record)


CHILD_TOOLS = {
    "barrier": barrier,
    "barrier + interval": barrier_interval,
    "pytest-run-parallel": run_parallel,
    "frontrun": frontrun,
    "frontrun, random": frontrun_random,
    "interleave-test, PCT": interleave,
    "scripted": scripted,
}
# What explore() is asked for; both search until the deadline.
EXPLORE = {
    "explore": {"strategy": "preemptions", "bound": 2},
    "explore, PCT": {"strategy": "pct"},
}
TOOLS = (*CHILD_TOOLS, *EXPLORE)
NEEDS = {
    "pytest-run-parallel": "pytest_run_parallel",
    "frontrun": "frontrun",
    "frontrun, random": "frontrun",
    "interleave-test, PCT": "interleave_test",
}


def said_of(record: dict[str, Any]) -> Said:
    """What the harness says of a record."""
    from harness.verdict import Verdict, findings, judge

    verdict = judge(record)
    text = "\n".join(map(str, findings(record)))
    return Said(verdict is not Verdict.COMPLETED, text, hung=verdict is Verdict.DEADLOCK)


def run_pytest(text: str, *options: str, parallel: bool = False) -> Said:
    """Runs one test file in this process; the words are its failures'."""
    import pytest

    reports: list[tuple[str, str]] = []

    class Collect:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                reports.append((report.outcome, str(report.longrepr or "")))

    head = f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport detection\n"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        file = Path(folder, "test_body.py")
        file.write_text(head + text)
        plain = ("-p", "no:cacheprovider", "-p", "no:race", "-p", "no:timeout", "-v")
        pytest.main([str(file), *plain, *options], plugins=[Collect()])
    if [outcome for outcome, _ in reports] not in (["passed"], ["failed"]):
        raise RuntimeError(f"the test did not run: {reports} {out.getvalue()}")
    if parallel and "PARALLEL" not in out.getvalue():
        raise RuntimeError(f"the test did not run in parallel: {out.getvalue()}")
    outcome, longest = reports[0]
    # The errors alone: the source lines round them hold the messages of other errors.
    words = "\n".join(line for line in longest.splitlines() if line.startswith("E "))
    unsure = "InconclusiveExploration" in words
    return Said(outcome == "failed" and not unsure, words, hung="eadlock" in words, unsure=unsure)


def pattern_of(file: str) -> str:
    """The modules of a file or folder, as frontrun names them."""
    return file.removesuffix(".py").replace("/", ".") + ("" if file.endswith(".py") else ".*")


def name_of(body: Body) -> str:
    """The key of a body."""
    return next(name for name, one in BODIES.items() if one is body)


# -- in this process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """How one run ended."""

    outcome: str
    seconds: float
    left: bool
    text: str


def runs(tool: str, name: str, count: int, deadline: float) -> Iterator[Run]:
    """Runs of one tool on one body."""
    from harness.explore import PRELOADED
    from harness.isolate import Isolation

    body = BODIES[name]
    # frontrun patches the locks that torch makes when it is imported.
    preload = () if tool.startswith("frontrun") else (*PRELOADED, *body.needs)
    with Isolation(preload=preload) as isolation:
        isolation.run(ready, label="ready")  # the import of torch is nobody's time
        for seed in range(count):
            if tool in EXPLORE:
                yield explored(body, EXPLORE[tool], deadline, isolation)
                continue
            given = {"tool": tool, "body": name, "seed": seed, "seconds": deadline}
            result = isolation.run(attempt, given, deadline=deadline * 1.5, label="run")
            if result.ended == "raised":
                raise RuntimeError(f"{tool} on {name}: {result.what}\n{result.error}")
            if result.ended != "returned":
                searching = tool.startswith("interleave") and result.ended == "hang"
                seconds = result.seconds - result.start_seconds
                yield Run(UNSURE if searching else HUNG, seconds, False, result.what)
                continue
            value = result.value
            said = Said(value["red"], value["text"], value["hung"], value["unsure"])
            outcome = outcome_of(body, said)
            left = value["patched"] and outcome in (MISSED, UNSURE)
            yield Run(outcome, value["seconds"], left, said.text)


def outcome_of(body: Body, said: Said) -> str:
    """One word for what a tool said."""
    if said.unsure:
        return UNSURE
    if said.red and re.search(body.says, said.text):
        return DETECTED
    if said.hung:
        return HUNG
    return OTHER if said.red or said.text else MISSED


def explored(body: Body, asked: dict[str, Any], deadline: float, isolation: Any) -> Run:
    """One search by the harness."""
    from harness.control import SWITCH_POINTS
    from harness.explore import Target, explore
    from harness.verdict import findings

    begun = time.monotonic()
    found = explore(
        Target(str(Path(__file__).resolve()), body.program),
        budget_seconds=deadline,
        points=body.points or SWITCH_POINTS,
        isolation=isolation,
        **asked,
    )
    took = time.monotonic() - begun  # with the run that confirms it
    text = "\n".join(map(str, findings(found.record or {}))) or str(found)
    if found.outcome != "found":
        outcome = {"clean": MISSED, "inconclusive": UNSURE}.get(found.outcome, OTHER)
    else:
        outcome = DETECTED if re.search(f"{body.says}|sticky state", text) else OTHER
    return Run(outcome, took, False, f"schedule {found.tried}: {text}")


def measure(tool: str, name: str, count: int, deadline: float, show: bool) -> bool:
    """Prints one line of the table; returns whether every run detected."""
    seconds, outcomes, left = [], Counter[str](), 0
    words: dict[str, str] = {}
    for run in runs(tool, name, count, deadline):
        seconds.append(run.seconds)
        outcomes[run.outcome] += 1
        left += run.left
        words.setdefault(run.outcome, run.text)
    rest = [f"{outcomes[word]} {word}" for word in (OTHER, HUNG, UNSURE, MISSED) if outcomes[word]]
    rest += [f"{left} left nn.Module patched"] if left else []
    print(
        f"{name:18} {tool:22} {outcomes[DETECTED]:3} of {count:<3} "
        f"median {statistics.median(seconds):6.2f} s  {', '.join(rest)}",
        flush=True,
    )
    for outcome, text in words.items() if show else ():
        print(f"    {outcome}: {' | '.join(text.strip().splitlines()[-12:])[-600:]}", flush=True)
    return outcomes[DETECTED] == count


def why_not(tool: str, body: Body) -> str | None:
    """Why a pair cannot be measured here."""
    for package in (*body.needs, *([NEEDS[tool]] if tool in NEEDS else [])):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def main() -> int:
    """Measures all pairs; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="of each tool on each body")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="this one (repeatable)")
    parser.add_argument("--body", action="append", choices=list(BODIES), help="the same")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for a search")
    parser.add_argument("--words", action="store_true", help="print what the tools said")
    options = parser.parse_args()
    if options.runs < 1 or not options.deadline > 0:
        parser.error("--runs and --deadline must be positive")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(", ".join(filter(None, map(release, PACKAGES))), flush=True)
    good = True
    for name in options.body or BODIES:
        for tool in options.tool or TOOLS:
            if (why := why_not(tool, BODIES[name])) is not None:
                print(f"{name:18} {tool:22} not measured: {why}", flush=True)
                continue
            every = measure(tool, name, options.runs, options.deadline, options.words)
            good &= every or tool != "scripted"
    return 0 if good else 1


PACKAGES = ("torch", "triton", "pytest-run-parallel", "frontrun", "interleave-test")


def release(package: str) -> str | None:
    """A package and its version, if it is installed; the first one also names Python's."""
    try:
        text = f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
    return f"Python {platform.python_version()}, {text}" if package == "torch" else text


if __name__ == "__main__":
    sys.exit(main())
