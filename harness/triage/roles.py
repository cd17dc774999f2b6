"""What a frame of torch does on its line, and which torch the frames of a log belong to.

A traceback of a compile failure shows `compile_wrapper` whether it raised or merely called the
compiled function. Which of the two is a fact of the version's source: it is read from the installed
torch when that is the log's version (without importing it), else from the tables in `roles/`
(2.8.0 to 2.15.0; `scripts/torch_roles.py` writes them). The version is the one that the log states,
or the one whose sources fit the frames best.

Not covered: versions outside the tables, patched sources, frames of files that no table has.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness.triage.events import Frame
from harness.triage.source import Act, FileFacts, checksum, facts_of

FOLDER = Path(__file__).parent / "roles"
FRAMES_FOR_INFERENCE = 400

RAISES = "raises here"
PASSED = "passed through"
LOCK = "waits for a lock"
OPERATES = "fails or goes on at an operation of this line"
UNKNOWN = "unknown on this version"

_WORDS = {
    Act.FX_CHECK: "raises here: the FX tracing flag was set",
    Act.RAISE: RAISES,
    Act.ASSERT: RAISES + " (assertion)",
    Act.LOCK: LOCK,
    Act.THROUGH: PASSED + ": calls the function that it wraps",
    Act.CALL: PASSED,
    Act.OTHER: OPERATES,
}


@dataclass(frozen=True)
class TorchVersion:
    """Which torch a log is of.

    Attributes:
        version: ``2.11.0``; None when the log does not tell.
        how: "stated", "inferred", "installed" or None.
        candidates: all versions that fit as well, newest last.
        why: one sentence.
        conflict: a sentence when the stated version and the frames disagree, else "".
    """

    version: str | None = None
    how: str | None = None
    candidates: tuple[str, ...] = ()
    why: str = "no frame of torch and no version in the text"
    conflict: str = ""

    def numbers(self) -> tuple[int, ...] | None:
        """(2, 11, 0); None when unknown."""
        return numbers(self.version) if self.version else None


def numbers(text: str) -> tuple[int, ...]:
    """``2.14.1+cpu`` -> (2, 14, 1); ``2.13`` -> (2, 13)."""
    return tuple(int(p) for p in text.split("+")[0].split(".")[:3] if p.isdigit())


@dataclass
class _Table:
    files: dict[str, Any]
    decoded: dict[str, FileFacts | None] = field(default_factory=dict)

    def facts(self, file: str) -> FileFacts | None:
        if file not in self.decoded:
            data = self.files.get(file)
            self.decoded[file] = FileFacts.from_json(data) if data is not None else None
        return self.decoded[file]


@lru_cache(maxsize=1)
def tabled() -> tuple[str, ...]:
    """The versions that the shipped tables cover, oldest first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=numbers))


@cache
def _table(name: str) -> _Table:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return _table(data["same_as"]) if "same_as" in data else _Table(data["files"])


@lru_cache(maxsize=1)
def installed() -> tuple[str, Path] | None:
    """(version, folder of the package torch) of this environment; None without torch."""
    try:
        name = version("torch").split("+")[0]
        spec = importlib.util.find_spec("torch")
    except (PackageNotFoundError, ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return name, Path(spec.origin).parent


@lru_cache(maxsize=256)
def _installed_facts(file: str) -> FileFacts | None:
    here = installed()
    if here is None:
        return None
    try:
        return facts_of((here[1].parent / file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def facts(torch: str, file: str) -> FileFacts | None:
    """The facts of one file on one version; None when nothing is known of it."""
    here = installed()
    if here is not None and here[0] == torch:
        return _installed_facts(file)
    return _table(torch).facts(file) if torch in tabled() else None


@dataclass(frozen=True)
class Role:
    """What a frame does: for people, and the act of the table (None when unknown)."""

    words: str
    act: Act | None = None


def role(frame: Frame, torch: TorchVersion, *, last: bool | None = None) -> Role:
    """The role of one frame.

    Args:
        last: whether it is the innermost frame of a whole traceback, which raised by definition;
            None when the text shows a part only, so that the source alone decides.
    """
    known = facts(torch.version, frame.file) if torch.version else None
    entry = known.acts.get(frame.line) if known is not None else None
    if known is not None and _misses(frame, known):
        entry = None
    act = entry[0] if entry else None
    if last is None:
        return Role(_WORDS[act] if act else UNKNOWN, act)
    if not last:
        return Role(_WORDS[act] if act is Act.THROUGH else PASSED, act)
    if act in (Act.FX_CHECK, Act.ASSERT, Act.RAISE):
        return Role(_WORDS[act], act)
    return Role(RAISES, act)


def infer(frames: Iterable[Frame], stated: Sequence[str] = ()) -> TorchVersion:
    """Which torch: what the log states, checked against its frames; else what the frames say."""
    of_torch = list(dict.fromkeys(frame for frame in frames if frame.of_torch))
    of_torch = of_torch[:FRAMES_FOR_INFERENCE]
    scores = _scores(of_torch)
    best = max((score for score, _ in scores.values()), default=0.0)
    fitting = [name for name in scores if scores[name][0] == best and best > 0]
    if stated:
        said = _said(stated, fitting)
        said = next((name for name in reversed(tabled()) if name == said), said)
        if said.count(".") == 1:  # "torch 2.11": the patch that fits, else the first
            patches = [name for name in tabled() if name.startswith(said + ".")]
            said = next((name for name in patches if name in fitting), (patches or [said])[0])
        conflict = ""
        if fitting and said in scores and best - scores[said][0] >= 3 and scores[said][1]:
            conflict = (
                f"the text states torch {said}, but {scores[said][1]} of its frames do not fit that"
                f" version and fit {_either(fitting)}"
            )
        return TorchVersion(said, "stated", (said,), "the text states it", conflict)
    if not of_torch:
        return TorchVersion()
    if not fitting:
        return TorchVersion(why="its torch frames fit no version from 2.8 to 2.15")
    frames_text = f"{len(of_torch)} distinct torch frames fit"
    if len(of_torch) == 1:
        frames_text = "1 distinct torch frame fits"
    here = installed()
    if len({numbers(name)[:2] for name in fitting}) == 1:
        clean = scores[fitting[-1]][1] == 0
        others = [n for n in scores if n not in fitting and not scores[n][1] and scores[n][0] > 0]
        why = f"{frames_text} the source of {_either(fitting)}"
        why += " best" if others or not clean else " and of no other tabled version"
        return TorchVersion(fitting[-1], "inferred", tuple(fitting), why)
    if here is not None and here[0] in fitting:
        return TorchVersion(
            here[0], "installed", tuple(fitting),
            f"{frames_text} {_either(fitting)}; the installed one is among them",
        )  # fmt: skip
    return TorchVersion(
        None, None, tuple(fitting), f"{frames_text} {_either(fitting)} equally well"
    )


def _said(stated: Sequence[str], fitting: Sequence[str]) -> str:
    """Of several stated versions one that the frames fit, then a whole one, then the last."""

    def worth(index: int) -> tuple[bool, bool, int]:
        text = stated[index]
        fits = any(name == text or name.startswith(f"{text}.") for name in fitting)
        return fits, text.count(".") > 1, index

    return stated[max(range(len(stated)), key=worth)]


def _scores(frames: Sequence[Frame]) -> dict[str, tuple[float, int]]:
    """Version -> (how well its sources fit the frames, how many frames do not fit)."""
    names = list(tabled())
    here = installed()
    if here is not None and here[0] not in names:
        names.append(here[0])
    scores = {}
    for name in names:
        total, misses = 0.0, 0
        for frame in frames:
            # Files that the tables lack would favour the installed version, which has them all.
            known = _facts_to_compare(name, frame.file)
            if known is None:
                continue
            points = _points(frame, known)
            total += points
            misses += points < 0
        scores[name] = (total, misses)
    return scores


def _facts_to_compare(name: str, file: str) -> FileFacts | None:
    if name in tabled():
        return _table(name).facts(file)
    return facts(name, file) if file in _table(tabled()[-1]).files else None


def _points(frame: Frame, known: FileFacts) -> float:
    """How well one frame fits one version of its file.

    A matching text of the source line says most. Without a text, a line that hands a call through
    or raises is a likelier place for a frame than any call; a line that does nothing is none.
    """
    if _misses(frame, known):
        return -3.0
    entry = known.acts.get(frame.line)
    if entry is None:
        return -1.0
    if frame.source:
        return 3.0
    return {Act.THROUGH: 2.0, Act.FX_CHECK: 2.0, Act.RAISE: 1.5}.get(entry[0], 1.0)


def _misses(frame: Frame, known: FileFacts) -> bool:
    """Whether the frame cannot stand on this version: another function, or another text."""
    if frame.function and known.function_at(frame.line) != frame.function.rpartition(".")[2]:
        return frame.function not in (
            "<lambda>",
            "<module>",
            "<listcomp>",
            "<genexpr>",
            "<dictcomp>",
        )
    entry = known.acts.get(frame.line)
    return bool(frame.source and entry and entry[1] != checksum(frame.source))


def _either(names: Sequence[str]) -> str:
    return " or ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
