"""Makes chosen globals of a loaded module thread-local, without editing the module's file.

torch keeps parts of its tracing state in plain module globals (the FX tracing flag, the
metadata of ``torch.fx.traceback``, the compile-session flag ...). One thread's value is then
every thread's value. :class:`ThreadLocalGlobals` gives each thread its own, in three moves:

1. every function of the module that reads or writes one of the names is compiled again from
   the module's own source with ``NAME`` replaced by ``STORE.NAME``, and its ``__code__`` is
   exchanged. The function *object* stays: whoever imported it, closed over it or decorated it
   before, ``compile_wrapper`` included, runs the new code. File and line numbers stay too;
2. the name leaves the module's dictionary and becomes a property of the module, so that
   ``module.NAME`` from elsewhere reads and writes the calling thread's value;
3. other modules that imported a *mutable* value by name (``from m import current_meta``) are
   treated the same way.

Not covered: state in C++, functions that are being executed during the exchange (install
before the threads start), and modules without source (an error, never a half-done exchange).

A thread that Python did not start (an autograd engine thread) is a thread like any other: it
starts from the values at rest and sees nothing that the thread which called ``backward()`` set.
"""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_STORE_NAME = "__thread_local_globals__"


class StateError(RuntimeError):
    """The state cannot be made thread-local on this torch; the message says why."""


class _Store(threading.local):
    """One attribute per name; a new thread begins with the values at rest."""

    def __init__(self, rest: Mapping[str, Callable[[], Any]], watched: frozenset[str]) -> None:
        fields = self.__dict__
        fields["_watched"] = watched
        fields["_rest"] = rest
        for name, make in rest.items():
            fields[name] = make()

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        if name in self._watched:
            _note_holder(name, bool(value))


# Which threads hold a watched flag: name -> thread ids. Plain sets: add and discard are atomic
# under the GIL, and the readers need a count, not a snapshot.
_holders: dict[str, set[int]] = {}


def _note_holder(name: str, held: bool) -> None:
    holders = _holders.setdefault(name, set())
    if held:
        holders.add(threading.get_ident())
    else:
        holders.discard(threading.get_ident())


def held_elsewhere(name: str) -> bool:
    """Whether a thread other than the calling one holds the watched flag ``name``."""
    holders = _holders.get(name)
    if not holders:
        return False
    return len(holders) > (threading.get_ident() in holders)


class _Rewriter(ast.NodeTransformer):
    """Replaces the free uses of ``names`` inside functions by attributes of the store."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.shadowed: list[set[str]] = []

    def _function(self, node: Any) -> Any:
        self.shadowed.append(_locals_of(node) & self.names.keys())
        # Decorators and defaults run in the enclosing scope, once, at import: left alone.
        body = node.body if isinstance(node.body, list) else [node.body]
        new_body = [new for old in body if (new := self.visit(old)) is not None]
        if isinstance(node.body, list):
            node.body = new_body or [ast.copy_location(ast.Pass(), node)]
        else:
            node.body = new_body[0]
        self.shadowed.pop()
        return node

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function
    visit_Lambda = _function

    def visit_Global(self, node: ast.Global) -> ast.Global | None:
        node.names = [name for name in node.names if name not in self.names]
        return node if node.names else None

    def visit_Name(self, node: ast.Name) -> ast.AST:
        inside_function = bool(self.shadowed)
        if (
            not inside_function
            or node.id not in self.names
            or any(node.id in names for names in self.shadowed)
        ):
            return node
        store = ast.copy_location(ast.Name(_STORE_NAME, ast.Load()), node)
        return ast.copy_location(ast.Attribute(store, self.names[node.id], node.ctx), node)


def _locals_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    arguments = node.args
    found = {
        argument.arg
        for argument in [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *([arguments.vararg] if arguments.vararg else []),
            *([arguments.kwarg] if arguments.kwarg else []),
        ]
    }
    declared_global: set[str] = set()
    pending: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
    while pending:
        item = pending.pop()
        if isinstance(item, ast.Global):
            declared_global.update(item.names)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store | ast.Del):
            found.add(item.id)
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
            continue
        elif isinstance(item, ast.Lambda):
            continue
        pending.extend(ast.iter_child_nodes(item))
    return found - declared_global


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _rewritten_codes(
    module: types.ModuleType, names: Mapping[str, str]
) -> dict[tuple[str, int], types.CodeType]:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise StateError(
            f"{module.__name__}: its source cannot be read ({error}), so its state cannot be made "
            "thread-local; use the guard 'force-compile', 'serial' or 'lock'"
        ) from error
    tree = _Rewriter(names).visit(ast.parse(source))
    future = getattr(module, "annotations", None)
    flags = getattr(future, "compiler_flag", 0)
    whole = compile(tree, module.__file__ or "<unknown>", "exec", flags=flags, dont_inherit=True)
    return {
        _key(code): code
        for code in _codes(whole)
        if _STORE_NAME in code.co_names
        or any(_STORE_NAME in inner.co_names for inner in _codes(code))
    }


class ThreadLocalGlobals:
    """Gives each thread its own value of some globals of ``module``.

    Args:
        module: the module that defines the globals.
        rest: name -> factory of the value that a new thread starts with.
        watched: names of flags whose holders are counted (:func:`held_elsewhere`).

    Raises:
        StateError: on install, if a name is missing, the source cannot be read, or a function
            that uses a name cannot be exchanged. Nothing is changed then.
    """

    def __init__(
        self,
        module: types.ModuleType,
        rest: Mapping[str, Callable[[], Any]],
        watched: frozenset[str] = frozenset(),
    ) -> None:
        self.module = module
        self.rest = dict(rest)
        self.store = _Store(self.rest, watched)
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Exchanges code, dictionary entries and module classes; undone by :meth:`remove`."""
        if self._undo:
            raise StateError(f"{self.module.__name__}: already thread-local")
        missing = [name for name in self.rest if name not in vars(self.module)]
        if missing:
            raise StateError(f"{self.module.__name__} has no global {', '.join(missing)}")
        targets: dict[types.ModuleType, dict[str, str]] = {
            self.module: {name: name for name in self.rest}
        }
        for module, alias, name in self._aliases():
            targets.setdefault(module, {})[alias] = name
        plans = {module: _rewritten_codes(module, names) for module, names in targets.items()}
        exchanges = [
            (function, plans[module][_key(function.__code__)])
            for module in targets
            for function in _functions_of(module)
            if _key(function.__code__) in plans[module]
        ]
        for function, code in exchanges:
            if function.__code__.co_freevars != code.co_freevars:
                raise StateError(f"{function.__qualname__}: its closure does not match its source")
        for module, names in targets.items():
            self._install_module(module, names)
        for function, code in exchanges:
            old = function.__code__
            function.__code__ = code
            self._undo.append(lambda function=function, old=old: _set_code(function, old))

    def remove(self) -> None:
        """Puts code, dictionaries and classes back; the process-wide values are those at rest."""
        while self._undo:
            self._undo.pop()()

    def _aliases(self) -> list[tuple[types.ModuleType, str, str]]:
        """Other modules that hold a reference to one of the mutable values."""
        values = {
            id(value): name
            for name in self.rest
            if isinstance(value := vars(self.module)[name], dict | list | set)
        }
        found = []
        for module in list(sys.modules.values()):
            if module is self.module or not isinstance(module, types.ModuleType):
                continue
            for alias, value in list(vars(module).items()):
                if id(value) in values and not alias.startswith("__"):
                    found.append((module, alias, values[id(value)]))
        return found

    def _install_module(self, module: types.ModuleType, names: Mapping[str, str]) -> None:
        store = self.store
        plain_class = module.__class__
        saved = {alias: vars(module)[alias] for alias in names}
        properties = {alias: _store_property(store, name) for alias, name in names.items()}
        vars(module)[_STORE_NAME] = store
        module.__class__ = type("ThreadLocalModule", (plain_class,), properties)
        for alias in names:
            del vars(module)[alias]

        def undo() -> None:
            module.__class__ = plain_class
            vars(module).update(saved)
            vars(module).pop(_STORE_NAME, None)

        self._undo.append(undo)


def _store_property(store: _Store, name: str) -> property:
    return property(
        lambda _module: getattr(store, name),
        lambda _module, value: setattr(store, name, value),
    )


def _functions_of(module: types.ModuleType) -> list[types.FunctionType]:
    """Every live function defined in ``module``, decorated, nested or imported elsewhere."""
    namespace = vars(module)
    return [
        item
        for item in gc.get_objects()
        if type(item) is types.FunctionType and item.__globals__ is namespace
    ]


def _set_code(function: types.FunctionType, code: types.CodeType) -> None:
    function.__code__ = code
