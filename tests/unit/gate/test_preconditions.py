"""Preconditions on recorded nvidia-smi text: each check holds, and each fails on its own fault.

No driver, no GPU and no import of torch is needed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import preconditions
from harness.preconditions import (
    EXIT_PRECONDITION,
    ROWS,
    Check,
    Limits,
    Machine,
    Torch,
    Unreadable,
    check,
    main,
    read_torch,
    render,
)

GPUS = """\
0, GPU-11111111-aaaa-0000-0000-000000000000, 580.65.06, 139800, NVIDIA H200
1, GPU-22222222-bbbb-0000-0000-000000000000, 580.65.06, 139800, NVIDIA H200
2, GPU-22223333-cccc-0000-0000-000000000000, 580.65.06, 2765, NVIDIA H200
"""
NOBODY = ""
# 94,822 MiB = 92.6 GiB held by a left-over process, as in a public report of such a gate.
LEFT_OVER = "GPU-11111111-aaaa-0000-0000-000000000000, 4711, 94822, /usr/bin/python3, --serve\n"


GOOD_TORCH = Torch("2.13.0", "13.0")


class Recorded:
    """Answers as nvidia-smi did, and remembers what it was asked."""

    def __init__(self, gpus: str = GPUS, processes: str = NOBODY) -> None:
        self.gpus, self.processes = gpus, processes
        self.asked: list[str] = []

    def __call__(self, arguments: Sequence[str]) -> str:
        self.asked.append(arguments[0])
        return self.gpus if "query-gpu" in arguments[0] else self.processes


def machine(
    tmp_path: Path,
    smi: preconditions.Smi | None = None,
    devices: str | None = None,
    torch: Torch | None = GOOD_TORCH,
) -> Machine:
    environ = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    return Machine(tmp_path, environ, smi or Recorded(), lambda: torch)


def failed(checks: Sequence[Check]) -> list[str]:
    return [one.name for one in checks if not one.ok]


ONE_GPU = Limits(gpus=1, min_free_gib=60, min_disk_gib=0)


def test_a_free_machine_passes_every_row(tmp_path: Path) -> None:
    checks = check(ONE_GPU, machine(tmp_path))
    assert failed(checks) == []
    assert [one.name for one in checks] == [row.name for row in ROWS]


def test_without_gpus_nvidia_smi_is_not_asked(tmp_path: Path) -> None:
    smi = Recorded()
    cpu_only = machine(tmp_path, smi, devices="99", torch=Torch("2.13.0+cpu", None))
    checks = check(Limits(0, 60, 0), cpu_only)
    assert [one.name for one in checks] == ["disk", "torch version"]
    assert failed(checks) == []
    assert smi.asked == []


def test_machine_only_leaves_torch_out(tmp_path: Path) -> None:
    checks = check(ONE_GPU, machine(tmp_path, torch=None), machine_only=True)
    assert failed(checks) == []
    assert not any("torch" in one.name for one in checks)


def test_a_foreign_process_is_named_with_pid_and_memory(tmp_path: Path) -> None:
    """SpecForge#707: a left-over process held 92.6 GiB and the gate failed elsewhere."""
    checks = check(ONE_GPU, machine(tmp_path, Recorded(processes=LEFT_OVER)))
    assert failed(checks) == ["foreign processes"]
    found = checks[-1].found
    assert "pid 4711 /usr/bin/python3, --serve holds 92.6 GiB on GPU 0" in found


def test_own_process_and_processes_on_other_gpus_are_not_foreign(tmp_path: Path) -> None:
    own = machine(tmp_path, Recorded(processes=LEFT_OVER))
    own.own_pids = frozenset({4711})
    assert failed(check(ONE_GPU, own)) == []
    elsewhere = machine(tmp_path, Recorded(processes=LEFT_OVER), devices="1")
    assert failed(check(ONE_GPU, elsewhere)) == []


def test_only_the_gpus_in_use_need_free_memory(tmp_path: Path) -> None:
    assert failed(check(ONE_GPU, machine(tmp_path, devices="0,2"))) == []
    first_is_full = check(ONE_GPU, machine(tmp_path, devices="2,0"))
    assert failed(first_is_full) == ["free GPU memory"]
    assert "GPU 2 has 2.7 GiB free" in "\n".join(render(first_is_full))


def test_memory_that_is_not_reported_is_not_free_memory(tmp_path: Path) -> None:
    smi = Recorded(gpus="0, GPU-1, 580.65.06, [N/A], NVIDIA GB10\n")
    assert failed(check(ONE_GPU, machine(tmp_path, smi))) == ["free GPU memory"]


@pytest.mark.parametrize("devices", ["GPU-11111111-aaaa-0000-0000-000000000000", "GPU-1111"])
def test_uuid_form_is_understood_also_abbreviated(tmp_path: Path, devices: str) -> None:
    one = machine(tmp_path, devices=devices)
    assert failed(check(ONE_GPU, one)) == []
    assert [gpu.index for gpu in one.visible] == [0]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("7", "there is no GPU 7 here; this machine has 0, 1, 2"),
        ("0,7", "there is no GPU 7 here"),
        ("GPU-9999", "there is no GPU GPU-9999 here"),
        ("GPU-2222", "fits 2 GPUs"),
        ("0,0", "names GPU 0 a second time"),
        ("first", "neither an index nor a GPU-... UUID"),
        ("-3", "neither an index nor a GPU-... UUID"),
        ("MIG-1c0f", "only whole GPUs"),
    ],
)
def test_bad_visible_devices_fail_at_once_with_one_line(
    tmp_path: Path, devices: str, said: str
) -> None:
    smi = Recorded()
    checks = check(ONE_GPU, machine(tmp_path, smi, devices))
    assert failed(checks) == ["visible GPUs"]
    assert checks[-1].name == "visible GPUs", "later GPU rows would only repeat it"
    line = render(checks)[-1]
    assert said in line
    assert f"CUDA_VISIBLE_DEVICES={devices}" in line
    assert "\n" not in line
    assert len(smi.asked) == 1, "processes need not be asked for"


@pytest.mark.parametrize("devices", ["", "-1", "0"])
def test_too_few_visible_gpus_fail(tmp_path: Path, devices: str) -> None:
    checks = check(Limits(2, 60, 0), machine(tmp_path, devices=devices))
    assert failed(checks) == ["visible GPUs"]


def test_a_missing_driver_is_one_failing_line(tmp_path: Path) -> None:
    def absent(_: Sequence[str]) -> str:
        raise Unreadable("nvidia-smi cannot be run: No such file or directory")

    checks = check(ONE_GPU, machine(tmp_path, absent))
    assert failed(checks) == ["driver"]
    assert checks[-1].name == "driver"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error\n", "0000:1B"),
        ("", "lists no GPU"),
    ],
)
def test_text_in_place_of_numbers_is_shown(tmp_path: Path, text: str, said: str) -> None:
    checks = check(ONE_GPU, machine(tmp_path, Recorded(gpus=text)))
    assert failed(checks) == ["driver"]
    assert said in checks[-1].found


def test_run_smi_turns_every_failure_into_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreadable, match="cannot be run"):
        preconditions.run_smi(["-L"])
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\necho more\nexit 9\n")
    fake.chmod(0o755)
    with pytest.raises(Unreadable, match=r"ended with 9 and said: NVIDIA-SMI has failed$"):
        preconditions.run_smi(["-L"])
    fake.write_text('#!/bin/sh\necho "got $1"\n')
    assert preconditions.run_smi(["-L"]) == "got -L\n"


@pytest.mark.parametrize(
    ("torch", "names"),
    [
        (None, ["torch version", "torch build"]),
        (Torch("2.13.0+cpu", None), ["torch build"]),
        (Torch("2.8.1", "12.8"), ["torch version"]),
        (Torch("2.16.0", "13.2"), ["torch version"]),
        (Torch("3.0.0", "13.2"), ["torch version"]),
        (Torch("unknown", "13.2"), ["torch version"]),
        (Torch("2.9.0", "12.8"), []),
        (Torch("2.15.1", "13.2"), []),
    ],
)
def test_torch_version_and_build(tmp_path: Path, torch: Torch | None, names: list[str]) -> None:
    assert failed(check(ONE_GPU, machine(tmp_path, torch=torch))) == names


def test_torch_is_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n"
        "raise SystemExit('executed')\n"
        "__version__ = '2.13.0'\n"
        "cuda: Optional[str] = '13.0'\n"
    )
    assert read_torch(tmp_path) == Torch("2.13.0", "13.0")
    with pytest.raises(Unreadable, match=r"version\.py"):
        read_torch(tmp_path / "absent")


def test_too_little_disk_fails_also_for_a_folder_not_made_yet(tmp_path: Path) -> None:
    later = machine(tmp_path)
    later.folder = tmp_path / "made" / "later"
    assert failed(check(Limits(0, 0, 0), later)) == []
    assert failed(check(Limits(0, 0, 10**9), later)) == ["disk"]
    assert not later.folder.exists()


def test_main_returns_the_code_and_writes_the_same_as_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report" / "preconditions.json"
    busy = machine(tmp_path, Recorded(processes=LEFT_OVER))
    assert main(1, 60, 0, tmp_path, path, machine=busy) == EXIT_PRECONDITION == 3
    printed = capsys.readouterr().out.splitlines()
    written = json.loads(path.read_text())
    assert written["ok"] is False
    assert len(printed) == len(written["checks"])
    assert [line.startswith("FAIL") for line in printed] == [
        not one["ok"] for one in written["checks"]
    ]
    assert main(1, 60, 0, tmp_path, None, machine=machine(tmp_path)) == 0


def test_negative_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gpus=-1"):
        main(-1, 0, 0, tmp_path, None)


def test_no_checks_are_no_proof() -> None:
    assert preconditions.passed([]) is False


def test_the_command_needs_the_standard_library_only() -> None:
    """The workflow runs it before anything is installed; `-S` hides all installed packages."""
    command = [sys.executable, "-S", "-P", preconditions.__file__, "--machine-only"]
    fine = subprocess.run(
        [*command, "--min-disk-gib", "0"], capture_output=True, text=True, timeout=30
    )
    assert (fine.returncode, fine.stderr) == (0, "")
    bad = subprocess.run([*command, "--gpus", "-1"], capture_output=True, text=True, timeout=30)
    assert bad.returncode == 2
    assert "gpus=-1" in bad.stderr
