"""Run as a program: kills a saving process at every step that reaches the disk, one after another.

Usage: crash_points.py FOLDER enumerated|timed COUNT. Every victim is a fork of this process, which
has imported torch once. After each death the parent looks at what is left and prints one JSON
line; the test that started it judges the lines.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import torch

from dflash import disk
from dflash.checkpoint import CheckpointStore

STEPS = ("make_folder", "write_bytes", "write_tensors", "sync", "rename", "remove")
WHOLE = ("make_folder", "sync", "rename")  # cannot be caught halfway


def content(step: int, numbers: int = 4096) -> tuple[dict, dict]:
    """What `step` saves: told apart from any other step's."""
    return {"weight": torch.full((numbers,), float(step))}, {"step": step, "note": "x" * 64}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(kill_at: int) -> None:
    """Wrap every step of `disk` so that the `kill_at`-th point (before, halfway, after) kills."""
    passed = 0

    def point() -> bool:
        nonlocal passed
        passed += 1
        return passed == kill_at

    def wrap(name, plain):
        def step(*arguments):
            if point():
                die()
            if name not in WHOLE and point():
                half(name, plain, arguments)
                die()
            plain(*arguments)
            if point():
                die()

        return step

    for name in STEPS:
        setattr(disk, name, wrap(name, getattr(disk, name)))


def half(name, plain, arguments) -> None:
    """Do half of a step: half of the file written, or one file of the folder removed."""
    path = arguments[0]
    if name == "remove":
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        inside[0].unlink(missing_ok=True)
    else:
        plain(*arguments)
        os.truncate(path, path.stat().st_size // 2)


def session(folder: Path, first: int) -> None:
    """Four saves with rotation and marks, as a run does it."""
    store = CheckpointStore(folder, keep=2)
    for step in range(first, first + 4):
        store.save(step, *content(step))
        store.mark_best(step, 1.0 if step == first else 0.5 * step)


def look(folder: Path, least: int) -> dict:
    """What the next process finds; `least` is the oldest step that may be the newest."""
    said: list[str] = []
    store = CheckpointStore(folder, keep=2)
    good = store.latest_good(said.append)
    found = {"least": least, "said": said, "step": None, "equal": None}
    if good is not None:
        tensors, state = store.load(good)
        expected, _ = content(state["step"], tensors["weight"].numel())
        found |= {
            "step": state["step"],
            "equal": torch.equal(tensors["weight"], expected["weight"]),
        }
    if (best := store.best()) is not None:
        store.load(best)
    return found


def enumerated(folder: Path, count: int) -> None:
    """One victim for each crash point, until a session survives (`count` is a limit)."""
    for point in range(1, count + 1):
        shutil.rmtree(folder, ignore_errors=True)
        CheckpointStore(folder, keep=2).save(1, *content(1))
        child = os.fork()
        if child == 0:
            install(point)
            session(folder, 2)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found = look(folder, 1) | {"point": point, "killed": os.WIFSIGNALED(status)}
        # The next run must be able to save over whatever is left.
        after = 100 + point
        CheckpointStore(folder, keep=2).save(after, *content(after))
        found["next"] = look(folder, after)["step"] == after
        found["left"] = sorted(p.name for p in folder.iterdir() if p.name.endswith(".part"))
        print(json.dumps(found), flush=True)
        if not found["killed"]:
            return


def timed(folder: Path, count: int) -> None:
    """`count` victims that save for ever; each is killed somewhere after it said that it began."""
    done = 0
    for _ in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            store = CheckpointStore(folder, keep=2)
            for step in range(done + 1, done + 1000):
                os.write(write, f"begin {step}\n".encode())
                store.save(step, *content(step, 200_000))
                os.write(write, f"saved {step}\n".encode())
            os._exit(1)
        os.close(write)
        with os.fdopen(read) as lines:
            begun = 0
            for line in lines:
                word, step = line.split()
                done = int(step) if word == "saved" else done
                begun += word == "begin"
                if begun == 2:
                    os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = look(folder, done)
        done = found["step"] or 0
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    {"enumerated": enumerated, "timed": timed}[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))
