"""Facts about a Python source file that a traceback can be checked against.

Covered: the functions with their line ranges, and for each line at which a frame can be shown what
that line does (raises, asserts, waits for a lock, calls, another operation) with a short checksum
of its text. The same reader serves the installed torch and the tables that the package ships
(`scripts/torch_roles.py` writes them), so both answer alike.

Not covered: what a call reaches at run time, generated code, and C++ sources.
"""

from __future__ import annotations

import ast
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Act(StrEnum):
    """What a line does when a frame stands on it."""

    FX_CHECK = "F"  # raises because it found the FX tracing flag set
    RAISE = "R"
    ASSERT = "A"
    LOCK = "L"
    THROUGH = "T"  # calls a function that it was given, with all its arguments
    CALL = "C"
    OTHER = "O"


# The act that says most wins where one line does several things.
_ORDER = (Act.FX_CHECK, Act.RAISE, Act.ASSERT, Act.LOCK, Act.THROUGH, Act.CALL, Act.OTHER)
_LOCKS = re.compile(r"(?:^|[._])(?:r?lock|mutex|cond|condition)$", re.I)
_FX_TESTS = {"is_fx_symbolic_tracing", "is_fx_tracing"}
_LINE = re.compile(r"([0-9a-z]+)([A-Z])(..)")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"


def checksum(text: str) -> str:
    """Two characters that stand for a stripped source line (1 of 4096)."""
    number = zlib.crc32(text.strip().encode("utf-8", "replace")) & 0xFFF
    return _DIGITS[number >> 6] + _DIGITS[number & 63]


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits or "0"


@dataclass
class FileFacts:
    """One source file of one torch version.

    Attributes:
        functions: (name, first line, last line), in order of the first line, nested ones after
            the function that holds them.
        acts: line number -> (what it does, checksum of its text).
    """

    functions: list[tuple[str, int, int]]
    acts: dict[int, tuple[Act, str]]
    _starts: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._starts = [start for _, start, _ in self.functions]

    def function_at(self, line: int) -> str | None:
        """The innermost function that holds ``line``; None outside of all."""
        index = bisect_right(self._starts, line)
        for name, start, end in reversed(self.functions[:index]):
            if start <= line <= end:
                return name
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` reads it."""
        text, last = [], 0
        for line in sorted(self.acts):
            act, mark = self.acts[line]
            text.append(f"{_base36(line - last)}{act}{mark}")
            last = line
        return {
            "functions": [[name, start, end - start] for name, start, end in self.functions],
            "acts": "".join(text),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FileFacts:
        """Raises KeyError, TypeError or ValueError for anything but :meth:`to_json`'s result."""
        acts, line = {}, 0
        for delta, act, mark in _LINE.findall(data["acts"]):
            line += int(delta, 36)
            acts[line] = (Act(act), mark)
        return cls([(name, start, start + size) for name, start, size in data["functions"]], acts)


def facts_of(source: str) -> FileFacts:
    """Reads a module's text. Raises SyntaxError for text that this Python cannot parse."""
    tree = ast.parse(source)
    texts = source.splitlines()
    functions: list[tuple[str, int, int]] = []
    acts: dict[int, Act] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.lineno, node.end_lineno or node.lineno))
        for line, act in _acts(node):
            if line not in acts or _ORDER.index(act) < _ORDER.index(acts[line]):
                acts[line] = act
    functions.sort(key=lambda entry: (entry[1], -entry[2]))
    known = FileFacts(functions, {})
    kept = {
        line: (act, checksum(texts[line - 1]))
        for line, act in acts.items()
        if known.function_at(line)
    }
    return FileFacts(functions, kept)


def _acts(node: ast.AST) -> Iterator[tuple[int, Act]]:
    if isinstance(node, ast.Raise):
        yield node.lineno, Act.RAISE
    elif isinstance(node, ast.If) and _tests_the_fx_flag(node.test):
        for inner in node.body:
            for deeper in ast.walk(inner):
                if isinstance(deeper, ast.Raise):
                    yield deeper.lineno, Act.FX_CHECK
    elif isinstance(node, ast.Assert):
        yield node.lineno, Act.ASSERT
        # Python shows the line of the failing comparison where an assertion spans several.
        yield node.test.lineno, Act.ASSERT
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            waits = _LOCKS.search(_name(item.context_expr))
            yield item.context_expr.lineno, Act.LOCK if waits else Act.CALL
            yield node.lineno, Act.LOCK if waits else Act.OTHER
    elif isinstance(node, ast.Call):
        callee = node.func
        act = _act_of_call(node)
        yield node.lineno, act
        if isinstance(callee, ast.Attribute):  # a.b().c() over several lines: the attribute's
            yield callee.end_lineno or node.lineno, act
    elif isinstance(node, ast.Subscript | ast.Delete):
        yield node.lineno, Act.OTHER
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield node.iter.lineno, Act.OTHER


def _act_of_call(node: ast.Call) -> Act:
    callee = node.func
    if isinstance(callee, ast.Attribute) and callee.attr == "acquire":
        return Act.LOCK if _LOCKS.search(_name(callee.value)) else Act.CALL
    all_of_both = any(isinstance(argument, ast.Starred) for argument in node.args) and any(
        keyword.arg is None for keyword in node.keywords
    )
    return Act.THROUGH if isinstance(callee, ast.Name) and all_of_both else Act.CALL


def _tests_the_fx_flag(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in _FX_TESTS
               for node in ast.walk(test)) or any(
        isinstance(node, ast.Name | ast.Attribute) and "fx_tracing_flag" in _name(node)
        for node in ast.walk(test)
    )  # fmt: skip


def _name(node: ast.expr) -> str:
    """``a.b.c`` for a name or attribute, "" for anything else."""
    if isinstance(node, ast.Attribute):
        inner = _name(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return node.id if isinstance(node, ast.Name) else ""
