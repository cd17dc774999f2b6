"""What must hold before a GPU gate starts, asked of the machine and never of torch itself.

Covers: the driver answers, enough visible GPUs, free memory on the GPUs that the gate will use,
no foreign compute process on them, free disk, and which torch is installed (version and build,
read from its `version.py`; importing torch would open the very devices that are being judged).
GPU rows run only when GPUs are asked for.

Does not cover: MIG slices (refused with one line), processes that the driver does not list as
compute (a desktop), clock throttling, ECC state, ROCm, and whether torch can really use the
devices: the gate's first GPU test says that. GPUs are numbered as `nvidia-smi` numbers them; set
CUDA_DEVICE_ORDER=PCI_BUS_ID so that CUDA counts the same way on machines with mixed models.

The checks are rows of ROWS with one reader, `check`. To add one, add a row and a test in which
it fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

EXIT_PRECONDITION = 3

# First and last supported minor release; pyproject.toml names the same two.
SUPPORTED_TORCH = ((2, 9), (2, 15))

# A healthy driver answers in under two seconds even with eight cold GPUs.
SMI_SECONDS = 30.0

_GPU_FIELDS = "index,uuid,driver_version,memory.free,name"
_PROCESS_FIELDS = "gpu_uuid,pid,used_memory,process_name"  # the name is last: it may hold commas
_CSV = "--format=csv,noheader,nounits"

Smi = Callable[[Sequence[str]], str]


class Unreadable(Exception):
    """A fact could not be read; the message is one line for the `found` column."""


@dataclass(frozen=True)
class Check:
    """One line of the result: what was looked at, what was found, what to do about it."""

    name: str
    ok: bool
    found: str
    wanted: str
    remedy: str


@dataclass(frozen=True)
class Limits:
    """What the gate asks for. Memory and disk in GiB; `gpus` = 0 asks for no device at all."""

    gpus: int
    min_free_gib: float
    min_disk_gib: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0:
                raise ValueError(f"{name}={value}: must not be negative; use 0 to ask for none")


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    driver: str
    free_gib: float | None  # None: the driver does not report it
    name: str


@dataclass(frozen=True)
class Process:
    gpu_uuid: str
    pid: int
    used_gib: float | None
    name: str


@dataclass(frozen=True)
class Torch:
    version: str
    cuda: str | None  # the CUDA release it was built for


def run_smi(arguments: Sequence[str]) -> str:
    """Standard output of nvidia-smi; raises Unreadable with one line when there is none."""
    try:
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except OSError as error:
        raise Unreadable(f"nvidia-smi cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unreadable(f"nvidia-smi gave no answer in {SMI_SECONDS:g} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise Unreadable(f"nvidia-smi ended with {done.returncode} and said: {said[0]}")
    return done.stdout


def read_torch(folder: Path | None = None) -> Torch | None:
    """The installed torch, or None; parsed from `version.py`, so nothing of it is executed."""
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable(f"{error.filename}: {error.strerror}") from None
    return Torch(_assigned("__version__", text) or "unknown", _assigned("cuda", text))


def _assigned(name: str, text: str) -> str | None:
    found = re.search(rf"""^{name}\b[^=\n]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    return found[1] if found else None


@dataclass
class Machine:
    """The facts, each read at most once. Tests replace the readers, not the parsing."""

    folder: Path
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    smi: Smi = run_smi
    torch_reader: Callable[[], Torch | None] = read_torch
    own_pids: frozenset[int] = field(default_factory=lambda: frozenset({os.getpid()}))

    @cached_property
    def gpus(self) -> list[Gpu]:
        lines = _lines(self.smi([f"--query-gpu={_GPU_FIELDS}", _CSV]))
        return [
            Gpu(int(index), uuid, driver, _gib(free), name)
            for index, uuid, driver, free, name in (_cells(line, 5) for line in lines)
        ]

    @cached_property
    def visible(self) -> list[Gpu]:
        """The caller's GPUs in the caller's order."""
        return choose(self.gpus, self.environ.get("CUDA_VISIBLE_DEVICES"))

    @cached_property
    def processes(self) -> list[Process]:
        lines = _lines(self.smi([f"--query-compute-apps={_PROCESS_FIELDS}", _CSV]))
        return [
            Process(uuid, int(pid), _gib(used), name)
            for uuid, pid, used, name in (_cells(line, 4, pid_column=1) for line in lines)
        ]

    @cached_property
    def torch(self) -> Torch | None:
        return self.torch_reader()


def choose(gpus: Sequence[Gpu], value: str | None) -> list[Gpu]:
    """Applies CUDA_VISIBLE_DEVICES: unset, indices, or (abbreviated) UUIDs.

    Stricter than CUDA, which hides everything after the first entry that it does not understand:
    a gate that silently ran on fewer GPUs would be the worse outcome.
    """
    if value is None:
        return list(gpus)
    if value.strip() in {"", "-1"}:
        return []
    here = f"CUDA_VISIBLE_DEVICES={value}"
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            raise Unreadable(f"{here}: {entry} is a MIG slice; only whole GPUs can be checked")
        if entry.startswith("GPU-"):
            found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        elif entry.isdecimal():
            found = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            raise Unreadable(f"{here}: {entry!r} is neither an index nor a GPU-... UUID")
        if not found:
            have = ", ".join(str(gpu.index) for gpu in gpus) or "none"
            raise Unreadable(f"{here}: there is no GPU {entry} here; this machine has {have}")
        if len(found) > 1:
            raise Unreadable(f"{here}: {entry} fits {len(found)} GPUs; write more of the UUID")
        if found[0] in chosen:
            raise Unreadable(f"{here}: {entry} names GPU {found[0].index} a second time")
        chosen.append(found[0])
    return chosen


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _cells(line: str, count: int, pid_column: int = 0) -> list[str]:
    # nvidia-smi reports some failures (a card that fell off the bus) as text on standard output.
    cells = [cell.strip() for cell in line.split(",", count - 1)]
    if len(cells) != count or not cells[pid_column].isdecimal():
        raise Unreadable(f"nvidia-smi said: {line.strip()}")
    return cells


def _gib(mib: str) -> float | None:
    return float(mib) / 1024 if re.fullmatch(r"\d+(\.\d+)?", mib) else None


# Row readers: (machine, limits) -> (holds, what was found). Each may raise Unreadable.


def _disk(machine: Machine, limits: Limits) -> tuple[bool, str]:
    folder = machine.folder.absolute()
    # The folder is often made later by the gate itself; its disk is that of the nearest parent.
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1024**3
    return free >= limits.min_disk_gib, f"{free:.1f} GiB free for {machine.folder}"


def _torch_range(machine: Machine, _: Limits) -> tuple[bool, str]:
    if machine.torch is None:
        return False, "torch is not installed in this environment"
    parts = re.match(r"(\d+)\.(\d+)", machine.torch.version)
    low, high = SUPPORTED_TORCH
    holds = parts is not None and low <= (int(parts[1]), int(parts[2])) <= high
    return holds, f"torch {machine.torch.version}"


def _torch_cuda(machine: Machine, _: Limits) -> tuple[bool, str]:
    if machine.torch is None:
        return False, "torch is not installed in this environment"
    built = f"CUDA {machine.torch.cuda}" if machine.torch.cuda else "no CUDA"
    return machine.torch.cuda is not None, f"torch {machine.torch.version}, built for {built}"


def _driver(machine: Machine, _: Limits) -> tuple[bool, str]:
    if not machine.gpus:
        return False, "nvidia-smi answers and lists no GPU"
    models = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    return True, f"driver {machine.gpus[0].driver}, {len(machine.gpus)} x {models}"


def _visible(machine: Machine, limits: Limits) -> tuple[bool, str]:
    numbers = ", ".join(str(gpu.index) for gpu in machine.visible) or "none"
    return len(machine.visible) >= limits.gpus, f"{len(machine.visible)} visible: {numbers}"


def _memory(machine: Machine, limits: Limits) -> tuple[bool, str]:
    used = machine.visible[: limits.gpus]
    short = [gpu for gpu in used if gpu.free_gib is None or gpu.free_gib < limits.min_free_gib]
    told = "; ".join(f"GPU {gpu.index} has {_amount(gpu.free_gib)} free" for gpu in short or used)
    return not short, told


def _foreign(machine: Machine, limits: Limits) -> tuple[bool, str]:
    index = {gpu.uuid: gpu.index for gpu in machine.visible[: limits.gpus]}
    foreign = [
        p for p in machine.processes if p.gpu_uuid in index and p.pid not in machine.own_pids
    ]
    told = "; ".join(
        f"pid {p.pid} {p.name} holds {_amount(p.used_gib)} on GPU {index[p.gpu_uuid]}"
        for p in foreign
    )
    return not foreign, told or "none"


def _amount(gib: float | None) -> str:
    return "an unreported amount" if gib is None else f"{gib:.1f} GiB"


@dataclass(frozen=True)
class Row:
    """One check as data.

    `wanted` is filled in from the limits.
    `needs`: "machine" rows hold before anything is installed, "torch" rows need the environment.
    `last`: when this row fails, later GPU rows could only repeat it and are left out.
    """

    name: str
    needs: str
    gpu: bool
    wanted: str
    read: Callable[[Machine, Limits], tuple[bool, str]]
    remedy: str
    last: bool = False


ROWS = (
    Row(
        "disk",
        "machine",
        False,
        "at least {min_disk_gib:g} GiB for caches and report",
        _disk,
        "empty old cache and report folders, or name a folder on another disk",
    ),
    Row(
        "torch version",
        "torch",
        False,
        "torch {}.{} to {}.{}".format(*SUPPORTED_TORCH[0], *SUPPORTED_TORCH[1]),
        _torch_range,
        "pip install -c constraints.txt torch",
    ),
    Row(
        "torch build",
        "torch",
        True,
        "a build for CUDA",
        _torch_cuda,
        "install torch from a CUDA index (not .../whl/cpu), or ask for no GPUs",
    ),
    Row(
        "driver",
        "machine",
        True,
        "an NVIDIA driver that answers",
        _driver,
        "install or restart the NVIDIA driver, or ask for no GPUs",
        last=True,
    ),
    Row(
        "visible GPUs",
        "machine",
        True,
        "at least {gpus}",
        _visible,
        "set CUDA_VISIBLE_DEVICES to GPUs that this machine has, or ask for fewer",
        last=True,
    ),
    Row(
        "free GPU memory",
        "machine",
        True,
        "at least {min_free_gib:g} GiB on each GPU in use",
        _memory,
        "end the process that holds the memory, or choose another GPU",
    ),
    Row(
        "foreign processes",
        "machine",
        True,
        "none on the GPUs in use",
        _foreign,
        "ask the owner to end it, or choose another GPU; the gate ends only its own processes",
    ),
)


def check(limits: Limits, machine: Machine, *, machine_only: bool = False) -> list[Check]:
    """Reads the rows that apply, in order. `machine_only` leaves out those that need torch."""
    checks: list[Check] = []
    gpu_rows = limits.gpus > 0
    for row in ROWS:
        if (row.gpu and not gpu_rows) or (machine_only and row.needs == "torch"):
            continue
        try:
            ok, found = row.read(machine, limits)
        except Unreadable as error:
            ok, found = False, str(error)
        wanted = row.wanted.format(**asdict(limits))
        checks.append(Check(row.name, ok, found, wanted, row.remedy))
        if row.last and not ok:
            gpu_rows = False
    return checks


def render(checks: Sequence[Check]) -> list[str]:
    """One plain line for each check; the remedy is said only where something is wrong."""
    return [
        f"ok    {one.name}: {one.found}"
        if one.ok
        else f"FAIL  {one.name}: {one.found}; wanted: {one.wanted}; do: {one.remedy}"
        for one in checks
    ]


def as_json(checks: Sequence[Check]) -> str:
    return json.dumps({"ok": passed(checks), "checks": [asdict(one) for one in checks]}, indent=2)


def passed(checks: Sequence[Check]) -> bool:
    """True when every check holds. No checks at all is no proof, hence False."""
    return bool(checks) and all(one.ok for one in checks)


def report(checks: Sequence[Check], json_path: Path | str | None) -> bool:
    """Prints the lines, writes the JSON where one is wanted, says whether all hold."""
    for line in render(checks):
        print(line)
    if json_path is not None:
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(checks) + "\n", encoding="utf-8")
    return passed(checks)


def main(
    gpus: int,
    min_free_gib: float,
    min_disk_gib: float,
    folder: Path | str,
    json_path: Path | str | None = None,
    *,
    machine_only: bool = False,
    machine: Machine | None = None,
) -> int:
    """0, or EXIT_PRECONDITION when something does not hold. Raises ValueError on a bad limit."""
    limits = Limits(gpus, min_free_gib, min_disk_gib)
    machine = machine or Machine(Path(folder))
    ok = report(check(limits, machine, machine_only=machine_only), json_path)
    return 0 if ok else EXIT_PRECONDITION


def _command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.preconditions")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--min-free-gib", type=float, default=0.0, help="on each GPU in use")
    parser.add_argument("--min-disk-gib", type=float, default=10.0)
    parser.add_argument("--folder", default=".", help="where caches and report will lie")
    parser.add_argument("--json", help="write the result here as well")
    parser.add_argument("--machine-only", action="store_true", help="leave out what needs torch")
    given = parser.parse_args(arguments)
    try:
        wanted = (given.gpus, given.min_free_gib, given.min_disk_gib)
        return main(*wanted, given.folder, given.json, machine_only=given.machine_only)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(_command())
