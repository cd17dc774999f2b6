"""The sessions. ``nox -s race`` is the gate on a CPU, ``nox -s tests`` all else without a GPU.

Exit codes: 0 passed, 1 a check failed, 2 bad input, 3 a precondition of the gate does not hold,
4 the gate's canary was not caught. What a session takes after ``--``: ``nox -s race -- --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"  # pip, so that constraints and index settings count
nox.options.sessions = ["tests", "race"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True  # a session that was asked for is not skipped

ROOT = Path(__file__).parent
PINNED_TORCH = "2.13.0"
SUPPORTED_TORCH = ((2, 9), (2, 15))
MATRIX_TORCH = ("2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
RIVALS = ("frontrun==0.7.0", "interleave-test==0.1.0", "pytest-run-parallel==0.10.0")
GATE_NUMBERS = {"GATE_GPUS": "0", "GATE_MIN_FREE_GIB": "16", "GATE_MIN_DISK_GIB": "5"}
BENCHMARKS_OF_OTHER_SESSIONS = {"demo", "detection"}
LAST_WORDS_SECONDS = 30.0
BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        _refuse(f"{self.prog}: {message}")


def _refuse(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _options(posargs: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(prog=prog, allow_abbrev=False, epilog="Everything else goes to pytest.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda (all GPUs in turn) or cuda:N")
    parser.add_argument("--guard", action="append", default=[], help="these guards only")
    parser.add_argument("--repeat", type=int, default=1, help="run each case N times")
    parser.add_argument(
        "--torch", default=PINNED_TORCH, help="another torch, in its own environment"
    )
    options, rest = parser.parse_known_args(posargs)
    if options.repeat < 1:
        _refuse(f"{prog}: --repeat must be at least 1, not {options.repeat}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", options.torch):
        _refuse(f"{prog}: --torch takes a release such as 2.11.0, not {options.torch!r}")
    major_minor = tuple(int(part) for part in options.torch.split(".")[:2])
    if not SUPPORTED_TORCH[0] <= major_minor <= SUPPORTED_TORCH[1]:
        oldest, newest = (".".join(map(str, pair)) for pair in SUPPORTED_TORCH)
        _refuse(
            f"{prog}: torch {options.torch} is not supported: use one from {oldest} to {newest}"
        )
    return options, rest


def _matrix_runs(posargs: Sequence[str]) -> int:
    parser = _Parser(prog="nox -s matrix --", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1, help="of each specimen")
    runs: int = parser.parse_args(posargs).runs
    if runs < 1:
        _refuse(f"nox -s matrix --: --runs must be at least 1, not {runs}")
    return runs


def _gate_number(name: str) -> str:
    """A number of the environment, as text; an empty one counts as not set."""
    value = os.environ.get(name) or GATE_NUMBERS[name]
    if not re.fullmatch(r"\d+" if name == "GATE_GPUS" else r"\d+(\.\d+)?", value):
        _refuse(f"{name} must be a number of 0 or more, not {value!r}")
    return value


def _benchmarks(posargs: Sequence[str]) -> list[str]:
    known = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    known -= BENCHMARKS_OF_OTHER_SESSIONS
    for name in posargs:
        if name not in known:
            _refuse(f"nox -s bench --: no benchmark {name!r}: use {', '.join(sorted(known))}")
    return list(posargs) or sorted(known)


def _check_before_anything_is_made() -> None:
    """Bad input ends here, before an environment is made; another torch gets its own ones."""
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    after = sys.argv[cut + 1 :]
    # `-s race`, `--session=race`, `-s "matrix(2.11.0)"`
    words = {word.rpartition("=")[2].partition("(")[0] for word in sys.argv[1:cut]}
    if "matrix" in words:
        _matrix_runs(after)
    if "bench" in words:
        _benchmarks(after)
    if "gate" in words:
        for name in GATE_NUMBERS:
            _gate_number(name)
    if not {"race", "gate"} & words:
        return
    options, _ = _options(after, f"nox -s {'race' if 'race' in words else 'gate'} --")
    if options.torch != PINNED_TORCH:
        nox.options.envdir = str(ROOT / ".nox" / f"torch-{options.torch}")


_check_before_anything_is_made()


def _install(session: nox.Session, *extras: str, torch: str = PINNED_TORCH) -> None:
    """The package with its extras, everything at the pinned version; another torch as asked."""
    constraints = ROOT / "constraints.txt"
    if torch != PINNED_TORCH:
        lines = constraints.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not re.match(r"(torch|triton|nvidia|cuda)\b", line)]
        constraints = Path(session.create_tmp()) / "constraints.txt"
        constraints.write_text("".join(kept))
    # torch by name and first: a bare requirement could take a newer release, with all of CUDA.
    session.install("-q", "-c", str(constraints), f"torch=={torch}")
    session.install("-q", "-c", str(constraints), "-e", f".[{','.join(extras)}]")


def _python(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> int:
    """Runs the environment's python and returns its exit code, which nox itself would hide."""
    session.log(f"python {' '.join(arguments)}")
    command = [str(Path(session.bin) / "python"), *arguments]
    child = subprocess.Popen(command, env=os.environ | (env or {}), cwd=ROOT)
    try:
        return child.wait()
    except KeyboardInterrupt:
        # The child has had Ctrl-C as well: pytest still prints what it has seen, a training run
        # saves. A second Ctrl-C ends it at once.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LAST_WORDS_SECONDS)
        raise
    finally:
        child.kill()  # nothing where it has ended
        child.wait()


def _finish(session: nox.Session, code: int, what: str) -> None:
    if code in (2, 3, 4):
        # pytest: 4 is a wrong option; its own 2 is an interrupt or a file that cannot be imported.
        sys.exit(code)
    if code != 0:
        session.error(f"{what} failed (exit code {code})")


def _pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> int:
    code = _python(session, "-m", "pytest", *arguments, env=env)
    return BAD_INPUT if code in (4, 5) else code  # wrong usage, or nothing to run


def _race_arguments(options: argparse.Namespace, report: str) -> list[str]:
    return [
        "tests/race",
        f"--race-repeat={options.repeat}",
        f"--race-device={options.device}",
        f"--race-report={report}",
        "--race-baseline=tests/race/baseline.toml",
        f"--junitxml={report}/junit.xml",
        *(f"--dflash-guard={name}" for name in options.guard),
    ]


def _no_gpu() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""}


@nox.session
def race(session: nox.Session) -> None:
    """The race gate: negative controls caught, guarded drafters complete."""
    options, rest = _options(session.posargs, "nox -s race --")
    _install(session, "test", torch=options.torch)
    workers = ["-n", "2"] if options.device == "cpu" else []
    env = _no_gpu() if options.device == "cpu" else {}
    arguments = _race_arguments(options, "build/race")
    _finish(session, _pytest(session, *arguments, *workers, *rest, env=env), "the race gate")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU, tests/race aside."""
    _install(session, "test")
    where = [
        f"tests/{name}"
        for name in ("unit", "triage", "parity", "e2e")
        if (ROOT / "tests" / name).is_dir()
    ]
    arguments = [
        *where,
        "-m",
        "not gpu1 and not gpu8",
        "-n",
        "2",
        "--junitxml=build/tests/junit.xml",
    ]
    _finish(session, _pytest(session, *arguments, *session.posargs, env=_no_gpu()), "tests")


@nox.session
def gate(session: nox.Session) -> None:
    """Before a merge, on a GPU runner or a laptop: preconditions, canary, races, end to end."""
    options, rest = _options(session.posargs, "nox -s gate --")
    _install(session, "test", torch=options.torch)
    report = os.environ.get("GATE_REPORT", str(ROOT / "build" / "gate"))
    gpus = int(_gate_number("GATE_GPUS"))
    limits = {
        "--gpus": str(gpus),
        "--min-free-gib": _gate_number("GATE_MIN_FREE_GIB"),
        "--min-disk-gib": _gate_number("GATE_MIN_DISK_GIB"),
    }
    flat = [word for pair in limits.items() for word in pair]
    device = options.device if options.device != "cpu" or not gpus else "cuda"
    options.device = device
    code = _python(
        session, "-m", "harness", "preconditions", *flat, "--folder", str(ROOT),
        "--json", f"{report}/preconditions.json",
    )  # fmt: skip
    _finish(session, code, "preconditions")
    code = _python(session, "-m", "harness", "canary", "--config", "pyproject.toml",
                   "--json", f"{report}/canary.json")  # fmt: skip
    _finish(session, code, "canary")
    env = _no_gpu() if device == "cpu" else {}
    workers = ["-n", "2"] if device == "cpu" else []
    codes = [
        _pytest(session, *_race_arguments(options, f"{report}/race"), *workers, *rest, env=env)
    ]
    if (ROOT / "tests" / "e2e").is_dir():
        marks = "not gpu8 and not gpu1" if not gpus else ("" if gpus >= 8 else "not gpu8")
        require = [f"--require-gpus={gpus}"] if gpus else []
        codes.append(
            _pytest(session, "tests/e2e", "-m", marks, *require,
                    f"--junitxml={report}/e2e.xml", env=env)
        )  # fmt: skip
    worst = max(codes)
    session.log(f"gate: {'passed' if worst == 0 else 'FAILED'}; report folder {report}")
    _finish(session, worst, "the gate")


@nox.session
def specimens(session: nox.Session) -> None:
    """The catalogue of races, each forced; damaged compile caches (Inductor: takes minutes)."""
    _install(session, "test")
    arguments = ["tests/specimens", "--junitxml=build/specimens/junit.xml"]
    _finish(session, _pytest(session, *arguments, *session.posargs, env=_no_gpu()), "specimens")


@nox.session
@nox.parametrize("torch", [nox.param(version, id=version) for version in MATRIX_TORCH])
def matrix(session: nox.Session, torch: str) -> None:
    """X-ray and specimens on one torch (about 5 GB each), and docs/versions.md from all results."""
    runs = _matrix_runs(session.posargs)
    _install(session, "test", torch=torch)
    script, folder = "tests/specimens/matrix.py", "build/matrix"
    out = f"{folder}/{torch}.json"
    (ROOT / out).unlink(missing_ok=True)  # a result of an earlier run must not pass for this one's
    code = _python(session, script, "measure", out, "--runs", str(runs), env=_no_gpu())
    if (ROOT / out).exists():
        _finish(session, _python(session, script, "write", folder, "docs/versions.md"), "writing")
    _finish(session, code, f"what the specimens state of torch {torch}")


@nox.session
def browser(session: nox.Session) -> None:
    """The HTML pages in a headless Chromium; needs Debian's chromium and chromium-driver."""
    _install(session, "browser")
    arguments = ["tests/browser", "--junitxml=build/browser/junit.xml"]
    _finish(session, _pytest(session, *arguments, *session.posargs, env=_no_gpu()), "browser")


@nox.session
def bench(session: nox.Session) -> None:
    """Side-by-side measurements, all or those named after --: costs, memory, speed, rates."""
    names = _benchmarks(session.posargs)
    _install(session, "bench")
    for name in names:
        session.run("python", f"benchmarks/{name}.py")


@nox.session(python="3.12")
def detection(session: nox.Session) -> None:
    """Detection rates beside other tools, on torch 2.11.0 (5 GB) and the Python that all have."""
    _install(session, "test", torch="2.11.0")
    session.install("-q", "-c", str(ROOT / "constraints.txt"), *RIVALS)
    code = _python(session, "benchmarks/detection.py", *session.posargs, env=_no_gpu())
    _finish(session, code, "a forced schedule")


@nox.session
def demo(session: nox.Session) -> None:
    """The tiny recipe from nothing: trains a drafter on two CPU cores and shows what it does."""
    _install(session, "train")
    code = _python(session, "benchmarks/demo.py", *session.posargs, env=_no_gpu())
    _finish(session, code, "the demo")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Triage on random and mutated logs: ten minutes, or as long as -- --seconds N says."""
    _install(session, "test")
    _finish(session, _python(session, "tests/unit/triage/fuzz.py", *session.posargs), "fuzzing")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy."""
    _install(session, "test", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
