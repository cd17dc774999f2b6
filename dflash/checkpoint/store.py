"""The folder of a run's checkpoints: save, rotate, mark the best, find and load.

`step-000123/` is a checkpoint; `step-000123.part` is one that is being written or removed, or that
a crash left, and is never taken for a checkpoint. The rename from the one to the other is the
moment at which a checkpoint exists. One writer at a time; readers may come at any time.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash import disk
from dflash.checkpoint.manifest import MANIFEST, CheckpointError, describe, verify

TENSORS = "tensors.safetensors"
STATE = "state.json"
BEST = "best.json"
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointStore:
    """The checkpoints below `folder`, of which the newest `keep` and the best are kept."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"CheckpointStore: keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder; then remove what is too old.

        tensors: by name, any shapes and dtypes; none may share memory with another.
        state: must come back from JSON as it is (so: lists, no tuples, string keys, no NaN).

        A step that is there already is left alone if it is equal, replaced if it is damaged, and
        otherwise refused. Raises CheckpointError; whatever was there before is then untouched.
        """
        text = _json(step, state)
        final = self.folder / f"step-{step:06d}"
        part = final.with_name(final.name + ".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            existing = self._intact(final, step)
            disk.make_folder(part)
            disk.write_tensors(part / TENSORS, tensors, {"format": "pt"})
            disk.sync(part / TENSORS)
            disk.write_bytes(part / STATE, text)
            disk.sync(part / STATE)
            manifest = describe(step, (part / TENSORS, part / STATE))
            if existing is not None:
                disk.remove(part)
                return self._same(final, existing, manifest)
            disk.write_bytes(part / MANIFEST, json.dumps(manifest, indent=1).encode())
            disk.sync(part / MANIFEST)
            disk.sync(part)
            disk.rename(part, final)
            disk.sync(self.folder)
        except OSError as error:
            self._give_up(part)
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written to {self.folder}: "
                f"{error.strerror or error}; {self._last()}"
            ) from error
        except (RuntimeError, ValueError, SafetensorError) as error:  # safetensors' refusals
            self._give_up(part)
            said = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint of step {step}: {said}; {self._last()}") from error
        self._rotate()
        return final

    def mark_best(self, step: int, metric: float) -> bool:
        """Note that `step` was measured at `metric` (higher is better); True if it is the best now.

        Raises CheckpointError where that step is not saved or the note cannot be written.
        """
        if not math.isfinite(metric):
            raise CheckpointError(f"best checkpoint: the metric of step {step} is {metric}")
        if step not in self.steps():
            raise CheckpointError(f"best checkpoint: step {step} is not saved in {self.folder}")
        known = self._best()
        if known is not None and known["step"] != step and metric <= known["metric"]:
            return False
        note = {"step": step, "metric": metric}
        try:
            disk.replace_file(self.folder / BEST, json.dumps(note).encode())
        except OSError as error:
            raise CheckpointError(
                f"best checkpoint: {self.folder / BEST} cannot be written: {error.strerror}"
            ) from error
        return True

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending, intact or not."""
        try:
            names = [entry.name for entry in self.folder.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def latest(self) -> Path | None:
        """The newest checkpoint, unverified; None where there is none."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The checkpoint that `mark_best` chose, unverified; None where there is none."""
        known = self._best()
        return None if known is None else self.path(known["step"])

    def latest_good(self, say: Callable[[str], object] = warnings.warn) -> Path | None:
        """The newest checkpoint that is intact; None where there are none at all.

        `say` gets one line for every newer one that is damaged. Raises CheckpointError where all
        of them are.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                verify(self.path(step), step)
            except CheckpointError as error:
                before = "the one before is tried" if step != steps[0] else "there is none before"
                say(f"{error}; {before}")
            else:
                return self.path(step)
        if steps:
            raise CheckpointError(f"{self.folder}: none of its {len(steps)} checkpoints is intact")
        return None

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"step-{step:06d}"

    @staticmethod
    def load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Verify the checkpoint at `path` and return its tensors (on the CPU) and its state.

        Raises CheckpointError for what is damaged, foreign or of a newer format.
        """
        path = Path(path)
        if path.name.endswith(".part"):
            raise CheckpointError(f"{path}: an unfinished checkpoint: use the one before")
        name = _NAME.fullmatch(path.name)
        listed = verify(path, int(name[1]) if name else None)["files"]
        if absent := {TENSORS, STATE} - set(listed):
            raise CheckpointError(f"{path}: damaged: {MANIFEST} lists no {sorted(absent)[0]}")
        try:
            state = json.loads((path / STATE).read_bytes())
            return load_file(path / TENSORS), state
        except (OSError, ValueError, SafetensorError) as error:
            said = " ".join(str(error).split())
            raise CheckpointError(f"{path}: cannot be loaded: {said}") from error

    def _best(self) -> dict[str, Any] | None:
        path = self.folder / BEST
        try:
            known = json.loads(path.read_bytes())
            known = {"step": int(known["step"]), "metric": float(known["metric"])}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: damaged: remove it to choose a new best") from error
        return known if known["step"] in self.steps() else None

    def _intact(self, final: Path, step: int) -> dict[str, Any] | None:
        """The manifest of what stands where a checkpoint is to be written; a damaged one goes."""
        if not final.exists():
            return None
        try:
            return verify(final, step)
        except CheckpointError:
            self._retire(final)
            return None

    def _same(self, final: Path, existing: dict[str, Any], new: dict[str, Any]) -> Path:
        if existing["files"] != new["files"]:
            raise CheckpointError(
                f"{final}: a different checkpoint of this step is there already: use another "
                f"folder, or remove the checkpoints newer than the one that was resumed"
            )
        return final

    def _rotate(self) -> None:
        """Remove old checkpoints. A failure here is said, not raised: the new one is safe."""
        try:
            spared = {*self.steps()[-self.keep :], (self._best() or {}).get("step")}
            for step in self.steps():
                if step not in spared:
                    self._retire(self.path(step))
        except (OSError, CheckpointError) as error:
            warnings.warn(f"old checkpoints are not removed: {error}", stacklevel=3)

    def _retire(self, path: Path) -> None:
        # Renamed first: a crash between two files must not leave what looks like a checkpoint.
        gone = path.with_name(path.name + ".part")
        disk.rename(path, gone)
        disk.remove(gone)

    def _remove_stale(self) -> None:
        for entry in list(self.folder.iterdir()):
            inner = entry.name.removesuffix(".part")
            if inner != entry.name and (_NAME.fullmatch(inner) or inner == BEST):
                disk.remove(entry)

    def _give_up(self, part: Path) -> None:
        with suppress(OSError):  # else the next save tries again
            disk.remove(part)

    def _last(self) -> str:
        latest = self.latest()
        return "there is no earlier one" if latest is None else f"the last one is {latest}"


def _json(step: int, state: Mapping[str, Any]) -> bytes:
    if isinstance(step, bool) or step < 0:
        raise CheckpointError(f"checkpoint: step must be 0 or more, got {step!r}")
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint of step {step}: state is not JSON: {error}") from error
    if json.loads(text) != state:
        key = next((k for k, v in json.loads(text).items() if state.get(k) != v), "its keys")
        raise CheckpointError(
            f"checkpoint of step {step}: state {key!r} changes on its way through JSON: use lists "
            f"for tuples and strings for keys"
        )
    return text.encode()
