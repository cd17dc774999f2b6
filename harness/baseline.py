"""Known findings, with an owner and a date after which they are no longer excused.

A baseline is a TOML file::

    [[finding]]
    case = "guard[serial-together]"
    verdict = "sticky state"
    owner = "maintainers"
    report = "https://github.com/pytorch/pytorch/issues/..."
    expires = 2027-03-31

A finding that is listed is excused until it expires; one that is not listed fails; one that is
listed and did not show, although its case ran, has gone away and is said.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from harness.verdict import Verdict

_FIELDS = {"case": str, "verdict": str, "owner": str, "report": str, "expires": date}


class BaselineError(ValueError):
    """The file cannot be used; one line says which entry and why."""


@dataclass(frozen=True)
class Known:
    """One entry; see the module's docstring."""

    case: str
    verdict: Verdict
    owner: str
    report: str
    expires: date

    def expired(self, today: date) -> bool:
        """Whether the day named has passed."""
        return today > self.expires


class Baseline:
    """The entries of one file, and which of them showed in this run."""

    def __init__(self, entries: Iterable[Known] = ()) -> None:
        self.entries = tuple(entries)

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Reads ``path``.

        Raises:
            BaselineError: it cannot be read, or an entry lacks a field or has a wrong one.
        """
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise BaselineError(f"{path}: cannot be read ({error.strerror})") from error
        except tomllib.TOMLDecodeError as error:
            raise BaselineError(f"{path}: {error}") from error
        if unknown := set(data) - {"finding"}:
            raise BaselineError(
                f"{path}: unknown table {sorted(unknown)[0]!r}, expected [[finding]]"
            )
        return cls(
            _entry(path, number, raw) for number, raw in enumerate(data.get("finding", ()), 1)
        )

    def find(self, case: str, verdict: str) -> Known | None:
        """The entry that excuses this verdict of this case, expired or not."""
        for entry in self.entries:
            if entry.case == case and entry.verdict == verdict:
                return entry
        return None

    def gone(self, shown: Iterable[tuple[str, str]], ran: Iterable[str]) -> list[Known]:
        """Entries whose case ran and did not show them."""
        shown, ran = set(shown), set(ran)
        return [e for e in self.entries if e.case in ran and (e.case, str(e.verdict)) not in shown]


def _entry(path: Path, number: int, raw: object) -> Known:
    where = f"{path}: finding {number}"
    if not isinstance(raw, dict):
        raise BaselineError(f"{where}: not a table")
    for name, kind in _FIELDS.items():
        if name not in raw:
            raise BaselineError(f"{where}: {name!r} is missing")
        if not isinstance(raw[name], kind) or not raw[name]:
            raise BaselineError(f"{where}: {name!r} must be a {kind.__name__}, not {raw[name]!r}")
    if unknown := set(raw) - set(_FIELDS):
        raise BaselineError(f"{where}: unknown field {sorted(unknown)[0]!r}")
    try:
        verdict = Verdict(raw["verdict"])
    except ValueError as error:
        raise BaselineError(f"{where}: unknown verdict {raw['verdict']!r}") from error
    return Known(raw["case"], verdict, raw["owner"], raw["report"], raw["expires"])
