"""Places in Python source as points: ``module:function@entry``, ``@exit``, ``@line:/regex/``.

A place is resolved when it is installed: the module is imported, the function looked up (through
its decorators; a function defined inside another is named by its path), the line found by its
text, which must match exactly once. What cannot be resolved is an error naming torch's version,
because lines and functions move between releases.

A place is installed by compiling the function again from its own source with one call added, and
by exchanging its ``__code__``: the function object stays, so whoever holds a reference reaches
the point, line numbers stay, and nobody else pays. Taking it out gives the function its own code
object back.

Not covered: C functions, functions without source, lambdas; frames (and nested functions) that
exist already when a place is installed keep their old code.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TEXT = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)@(entry|exit|line:/(.+)/)")
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


class PlaceError(RuntimeError):
    """A place cannot be read, or does not exist in the installed version; one line says why."""


@dataclass(frozen=True)
class Place:
    """One place.

    Attributes:
        module: dotted name, imported when the place is resolved.
        function: dotted path of the function in its module; what follows a function's own name
            is the path of a function defined inside it.
        at: ``entry``, ``exit`` or ``line``.
        pattern: with ``line``, a regular expression that one source line of the function matches;
            the point comes before that line's statement.
    """

    module: str
    function: str
    at: str
    pattern: str = ""

    def __str__(self) -> str:
        at = f"line:/{self.pattern}/" if self.at == "line" else self.at
        return f"{self.module}:{self.function}@{at}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Reads the form that :meth:`__str__` writes.

        Raises:
            PlaceError: the text has another form, or its regular expression is not one.
        """
        match = _TEXT.fullmatch(text)
        if match is None or not text.isprintable():
            raise PlaceError(
                f"{text!r} is not a place: write module:function@entry, @exit or @line:/regex/"
            )
        module, function, at, pattern = match.groups()
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise PlaceError(f"{text!r}: {error} in its regular expression") from error
        return cls(module, function, "line" if pattern is not None else at, pattern or "")


def is_place(text: str) -> bool:
    """Whether ``text`` has the form of a place."""
    try:
        Place.parse(text)
    except PlaceError:
        return False
    return True


class Installed:
    """Places that are installed; :meth:`remove` puts every code object back."""

    def __init__(self) -> None:
        self._old: list[tuple[types.FunctionType, types.CodeType]] = []

    def remove(self) -> None:
        """Gives all functions their own code again; harmless when done twice."""
        while self._old:
            function, code = self._old.pop()
            function.__code__ = code


def install(places: Mapping[Place, Callable[[], None]]) -> Installed:
    """Installs every place with the function that a thread calls there.

    Raises:
        PlaceError: one of them cannot be resolved; then none is installed.
    """
    wanted: dict[types.FunctionType, list[tuple[tuple[str, ...], Place, Callable[[], None]]]] = {}
    for place, call in places.items():
        function, inner = find(place)
        wanted.setdefault(function, []).append((inner, place, call))
    new = {function: _with_calls(function, rows) for function, rows in wanted.items()}
    installed = Installed()
    for function, code in new.items():
        installed._old.append((function, function.__code__))
        function.__code__ = code
    return installed


def resolve(places: Iterable[Place]) -> None:
    """Checks that every place can be installed, and installs nothing.

    Raises:
        PlaceError: for the first one that cannot.
    """
    for place in places:
        function, inner = find(place)
        _with_calls(function, [(inner, place, _nothing)])


def find(place: Place) -> tuple[types.FunctionType, tuple[str, ...]]:
    """The function object that carries the place, and the path inside it."""
    try:
        thing: Any = importlib.import_module(place.module)
    except ImportError as error:
        raise _unresolved(place, f"cannot import {place.module} ({error})") from error
    path = place.function.split(".")
    for position, name in enumerate(path):
        if isinstance(thing, types.FunctionType):
            return thing, tuple(path[position:])
        try:
            thing = inspect.getattr_static(thing, name)
        except AttributeError:
            raise _unresolved(place, f"there is no {'.'.join(path[: position + 1])}") from None
        if isinstance(thing, staticmethod | classmethod):
            thing = thing.__func__
        if not isinstance(thing, type):
            thing = inspect.unwrap(thing)
    if not isinstance(thing, types.FunctionType):
        raise _unresolved(place, f"{place.function} is not a Python function")
    return thing, ()


def _unresolved(place: Place, why: str) -> PlaceError:
    from importlib.metadata import PackageNotFoundError, version

    package = place.module.partition(".")[0]
    try:
        which = f"{package} {version(package)}"
    except PackageNotFoundError:
        which = package
    return PlaceError(f"point {place} does not exist in {which}: {why}")


def _nothing() -> None:
    return None


# -- source to code ----------------------------------------------------------------------------


def _with_calls(
    function: types.FunctionType,
    rows: list[tuple[tuple[str, ...], Place, Callable[[], None]]],
) -> types.CodeType:
    code, first = function.__code__, rows[0][1]
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError) as error:
        raise _unresolved(first, f"{first.function} has no source") from error
    indented = source[:1].isspace()
    tree = ast.parse(f"if 1:\n{source}" if indented else source)
    outer = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]
    if not isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
        raise _unresolved(first, f"{first.function} is not written as 'def'")
    ast.increment_lineno(tree, code.co_firstlineno - (2 if indented else 1))
    outer.decorator_list = []
    lines = dict(enumerate(source.split("\n"), start=code.co_firstlineno))
    calls: dict[str, Callable[[], None]] = {}
    # Lines first: they are looked up in the tree as it is written.
    for inner, place, call in sorted(rows, key=lambda row: row[1].at != "line"):
        marker = f"race point {len(calls)} {place}"
        calls[marker] = call
        _insert(_inside(outer, inner, place), place, lines, marker)
    return _compile(function, outer, calls)


def _inside(
    outer: ast.FunctionDef | ast.AsyncFunctionDef, path: tuple[str, ...], place: Place
) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node: ast.AST = outer
    for name in path:
        found = [
            child
            for child in _own_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and child.name == name
        ]
        if len(found) != 1:
            raise _unresolved(place, f"{place.function} is defined {len(found)} times")
        node = found[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise _unresolved(place, f"{place.function} is a class")
    return node


def _own_nodes(node: ast.AST) -> Iterable[ast.AST]:
    """All nodes below ``node`` that belong to its own scope, definitions in it included."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _own_nodes(child)


def _insert(
    node: ast.FunctionDef | ast.AsyncFunctionDef, place: Place, lines: dict[int, str], marker: str
) -> None:
    if place.at == "line":
        body, index = _statement(node, place, lines)
        body.insert(index, _call(marker, body[index]))
        return
    start = 1 if ast.get_docstring(node, clean=False) is not None else 0
    rest = node.body[start:] or [ast.copy_location(ast.Pass(), node.body[-1])]
    if place.at == "entry":
        node.body[start:] = [_call(marker, rest[0]), *rest]
    else:
        whole = ast.Try(body=rest, handlers=[], orelse=[], finalbody=[_call(marker, rest[-1])])
        node.body[start:] = [ast.copy_location(whole, rest[0])]


def _statement(
    node: ast.FunctionDef | ast.AsyncFunctionDef, place: Place, lines: dict[int, str]
) -> tuple[list[ast.stmt], int]:
    """The body and index of the statement on the one line that the pattern matches."""
    pattern = re.compile(place.pattern)
    found = [
        number
        for number in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
        if pattern.search(lines[number].strip())
    ]
    if len(found) != 1:
        raise _unresolved(place, f"{len(found)} of its lines match, it must be one")
    best: tuple[list[ast.stmt], int] | None = None
    for parent in [node, *_own_nodes(node)]:
        for name in ("body", "orelse", "finalbody"):
            body = getattr(parent, name, None)
            if not isinstance(body, list):
                continue
            for index, statement in enumerate(body):
                if not isinstance(statement, ast.stmt):
                    continue
                if statement.lineno <= found[0] <= (statement.end_lineno or statement.lineno) and (
                    best is None or statement.lineno >= best[0][best[1]].lineno
                ):
                    best = body, index
    if best is None:
        raise _unresolved(place, f"line {found[0]} is in no statement of its own")
    statement = best[0][best[1]]
    if isinstance(getattr(statement, "body", None), list) and statement.lineno != found[0]:
        raise _unresolved(place, f"line {found[0]} begins no statement")
    return best


def _call(marker: str, beside: ast.stmt) -> ast.Expr:
    # The marker is a constant that is exchanged for the function once the code is compiled.
    call = ast.Expr(ast.Call(func=ast.Constant(marker), args=[], keywords=[]))
    for node in ast.walk(call):
        if isinstance(node, ast.expr | ast.stmt):
            node.lineno, node.col_offset = beside.lineno, beside.col_offset
            node.end_lineno, node.end_col_offset = beside.lineno, beside.col_offset
    return call


def _compile(
    function: types.FunctionType,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    calls: dict[str, Callable[[], None]],
) -> types.CodeType:
    old = function.__code__
    # The function's free variables become parameters of a function round it; the class round
    # it is there for names with two underscores.
    holder = ast.parse(f"def around({', '.join(n for n in old.co_freevars)}):\n pass")
    around = holder.body[0]
    assert isinstance(around, ast.FunctionDef)
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    if owner and owner != "<locals>":
        wrapper = ast.parse(f"class {owner}:\n pass").body[0]
        assert isinstance(wrapper, ast.ClassDef)
        wrapper.body = [node]
        # By its own name the function means the module's class, not this one.
        declared = [] if owner in old.co_freevars else [ast.Global([owner])]
        around.body = [*declared, wrapper]
    else:
        around.body = [node]
    ast.fix_missing_locations(holder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # 'str' object is not callable
        module = compile(
            holder, old.co_filename, "exec", flags=old.co_flags & _FUTURE, dont_inherit=True
        )
    new = _find_code(module, node.name, node.lineno)
    if new is None or new.co_freevars != old.co_freevars:
        raise PlaceError(
            f"{function.__module__}.{function.__qualname__} cannot be compiled again from its "
            "source: its free variables are others"
        )
    return _finish(new, new.co_qualname, old.co_qualname, calls).replace(
        co_firstlineno=old.co_firstlineno
    )


def _find_code(code: types.CodeType, name: str, line: int) -> types.CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_name == name and constant.co_firstlineno == line:
                return constant
            if (below := _find_code(constant, name, line)) is not None:
                return below
    return None


def _finish(
    code: types.CodeType, prefix: str, qualname: str, calls: dict[str, Callable[[], None]]
) -> types.CodeType:
    """The same code with functions in place of markers and the qualified names of the original."""

    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _finish(value, prefix, qualname, calls)
        return calls.get(value, value) if isinstance(value, str) else value

    name = code.co_qualname
    return code.replace(
        co_consts=tuple(constant(value) for value in code.co_consts),
        co_qualname=qualname + name[len(prefix) :] if name.startswith(prefix) else name,
    )
