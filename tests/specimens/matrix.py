"""What is broken in which torch: x-ray and all specimens on one version, and the table of several.

    python tests/specimens/matrix.py measure build/matrix/2.11.0.json [--runs N]
    python tests/specimens/matrix.py write build/matrix docs/versions.md

``measure`` runs on the installed torch; ``nox -s matrix`` runs it in one environment per version,
then ``write``, which replaces what stands between the markers in the document. A version without
a file is shown as not run; a specimen that a torch is too old for, or that could not run, says so.

Exit code 1: something is not as the specimens state (the file is written all the same); 2: bad
input. Not here: the race suite (``nox -s race -- --torch X``).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SCHEMA = 1
VERSIONS = ("2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
LINE = 200  # characters of a difference that the document shows; the result's file has all
TOO_OLD, NOT_RUN = "-", "not run"

Result = Mapping[str, Any]


class MatrixError(ValueError):
    """Bad input; one line says what and where."""


# -- measure ---------------------------------------------------------------------------------------


def measure(runs: int) -> dict[str, Any]:
    """X-ray and specimens on the installed torch, as plain data."""
    import replay
    import torch
    from specimen import facts, names

    from harness.explore import PRELOADED
    from harness.isolate import Isolation
    from harness.xray import xray

    print(f"torch {torch.__version__}: x-ray", flush=True)
    seen = xray().as_dict()
    columns = seen["columns"]
    rows = []
    with Isolation(preload=(*PRELOADED, "dflash.compile")) as isolation:
        for name in names():
            specimen = facts(name)
            expected = specimen.expected(torch.__version__)
            row: dict[str, Any] = {"name": name, "state": specimen.state}
            rows.append(row)
            if expected is None:
                continue
            records = [replay.run(name, isolation) for _ in range(runs)]
            row["native"] = told(records, expected.unmet)
            row["native"]["refused"] = expected.refused
            if (guarded := specimen.behind_guard(torch.__version__)) is not None:
                unfix = specimen.unfix_here(torch.__version__)
                records = [
                    replay.run(name, isolation, unfix=unfix, guard="auto") for _ in range(runs)
                ]
                row["guarded"] = told(records, guarded.unmet)
                row["guarded"] |= {"refused": guarded.refused, "unfix": unfix}
            print(f"{name:34} {_cell(row, 'native'):28} guarded: {_cell(row, 'guarded')}")
    return {
        "schema": SCHEMA,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "runs": runs,
        "leaks": {name: len(stages) for name, stages in seen["leaks"].items()},
        "unknown": sorted(
            name
            for name in seen["probes"]
            if not any(
                name in c["cells"] and c["cells"][name]["look"] != "unknown" for c in columns
            )
        ),
        "sticky": seen["sticky"],
        "problems": seen["problems"],
        "specimens": rows,
    }


def told(records: Sequence[Mapping[str, Any]], unmet: Any) -> dict[str, Any]:
    """Verdicts with their counts, and what is not as stated, once each."""
    from harness.verdict import judge

    verdicts: Counter[str] = Counter()
    lines: dict[str, None] = {}
    for record in records:
        process = record.get("process", {})
        failed = process.get("ended") == "raised" and not record.get("outcomes")
        verdicts["cannot run" if failed else str(judge(record))] += 1
        if failed:
            lines |= {str(process.get("what", "")): None}
        else:
            lines |= dict.fromkeys(unmet(record))
    return {"verdicts": dict(verdicts), "unmet": list(lines)}


def unmet(result: Result) -> list[str]:
    """One line per difference between what was measured and what is stated."""
    lines = [f"x-ray: {line}" for line in (*result["problems"], *result["sticky"])]
    for row in result["specimens"]:
        for kind in ("native", "guarded"):
            lines += [
                f"{row['name']}, {kind}: {line}" for line in row.get(kind, {}).get("unmet", ())
            ]
    return lines


# -- write -----------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Result]:
    """Version (without its build) -> result.

    Raises:
        MatrixError: no result, or a file that is none.
    """
    results: dict[str, Result] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text())
            if result["schema"] != SCHEMA:
                raise MatrixError(f"{path}: schema {result['schema']}, this reads {SCHEMA}")
            version = result["torch"].split("+")[0]
        except MatrixError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MatrixError(
                f"{path}: is not a result of 'matrix.py measure' ({error})"
            ) from error
        if version in results:
            raise MatrixError(f"{path}: torch {version} is in another file too: delete one")
        results[version] = result
    if not results:
        raise MatrixError(f"{folder}: holds no result; run 'nox -s matrix' first")
    return results


def render(results: Mapping[str, Result]) -> str:
    """The generated part of the document, without its markers."""
    versions = sorted({*VERSIONS, *results}, key=lambda v: tuple(map(int, v.split("."))))
    return "\n".join(
        (
            *_environments(versions, results),
            "",
            *_specimens(versions, results),
            "",
            *_differences(versions, results),
            "",
            *_leaks(versions, results),
        )
    )


def write(folder: Path, document: Path) -> None:
    """Puts the tables of ``folder``'s results between the document's markers.

    Raises:
        MatrixError: no results, or a document without the markers.
    """
    text = render(load(folder))
    try:
        old = document.read_text()
    except OSError as error:
        raise MatrixError(f"{document}: cannot be read ({error.strerror})") from error
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise MatrixError(f"{document}: needs the lines '{BEGIN}' and '{END}', once each")
    head, rest = old.split(BEGIN)
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def _environments(versions: Sequence[str], results: Mapping[str, Result]) -> list[str]:
    lines = ["| torch | build | Python | runs of each specimen |", "|---|---|---|---|"]
    for version in versions:
        if version not in results:
            lines.append(f"| {version} | {NOT_RUN} | | |")
            continue
        one = results[version]
        build = one["torch"].partition("+")[2] or "as published"
        lines.append(f"| {version} | {build} | {one['python']} | {one['runs']} |")
    return lines


def _specimens(versions: Sequence[str], results: Mapping[str, Result]) -> list[str]:
    lines = [
        f"| specimen | {' | '.join(versions)} | behind the guard |",
        f"|---|{'---|' * len(versions)}---|",
    ]
    rows = {
        version: {row["name"]: row for row in result["specimens"]}
        for version, result in results.items()
    }
    for name in sorted({name for known in rows.values() for name in known}):
        cells = [
            NOT_RUN if version not in rows else _cell(rows[version].get(name, {}), "native")
            for version in versions
        ]
        guarded = {
            _cell(known[name], "guarded"): None
            for known in rows.values()
            if known.get(name, {}).get("guarded")
        }
        behind = "; ".join(guarded) or "no race"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {behind} |")
    return lines


def _cell(row: Mapping[str, Any], kind: str) -> str:
    """``raised``; with ``2 of 3`` where not all runs agree; ``(!)`` where it is not as stated."""
    one = row.get(kind)
    if not one:
        return TOO_OLD
    verdicts: Mapping[str, int] = one["verdicts"]
    total = sum(verdicts.values())
    words = [
        word if count == total else f"{word} {count} of {total}" for word, count in verdicts.items()
    ]
    refused = one.get("refused") and not one["unmet"]
    text = "the order cannot be had" if refused else ", ".join(words)
    return f"{text} (!)" if one["unmet"] else text


def _differences(versions: Sequence[str], results: Mapping[str, Result]) -> list[str]:
    lines = [
        f"* torch {version}: {line if len(line) <= LINE else line[:LINE] + ' ...'}"
        for version in versions
        if version in results
        for line in unmet(results[version])
    ]
    return ["Not as the specimens state, marked (!):", "", *(lines or ["* nothing"])]


def _leaks(versions: Sequence[str], results: Mapping[str, Result]) -> list[str]:
    lines = [
        f"| state that another thread sees, at so many stages | {' | '.join(versions)} |",
        f"|---|{'---|' * len(versions)}",
    ]
    for name in sorted({name for one in results.values() for name in one["leaks"]}):
        cells = []
        for version in versions:
            one = results.get(version)
            if one is None:
                cells.append(NOT_RUN)
            elif name in one["unknown"]:
                cells.append("?")
            else:
                cells.append(str(one["leaks"].get(name, "-")))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# -- command ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="the installed torch")
    one.add_argument("out", type=Path)
    one.add_argument("--runs", type=int, default=1, help="of each specimen")
    other = commands.add_parser("write", help="the tables into the document")
    other.add_argument("folder", type=Path)
    other.add_argument("document", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "measure" and options.runs < 1:
        parser.error(f"--runs must be at least 1, not {options.runs}")
    try:
        if options.command == "write":
            write(options.folder, options.document)
            return 0
        result = measure(options.runs)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    except (MatrixError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differences = unmet(result)
    for line in differences:
        print(f"NOT AS STATED: {line}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
