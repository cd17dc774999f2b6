"""Makes chosen globals of a loaded module thread-local, without editing the module's file.

torch keeps parts of its tracing state in plain module globals (the FX tracing flag, the
metadata of ``torch.fx.traceback``, the compile-session flag ...). One thread's value is then
every thread's value. :class:`ThreadLocalGlobals` gives each thread its own, in three moves:

1. every function of the module that reads or writes one of the names is compiled again from
   the module's own source with ``NAME`` replaced by ``STORE.NAME``, and its ``__code__`` is
   exchanged. The function *object* stays: whoever imported it, closed over it or decorated it
   before, ``compile_wrapper`` included, runs the new code. File and line numbers stay too.
   Which ``NAME`` is the global one is not worked out here: the bytecode of the unchanged source
   says so, with the position of each use;
2. the name leaves the module's dictionary and becomes a property of the module, so that
   ``module.NAME`` from elsewhere reads and writes the calling thread's value;
3. other modules that imported a *mutable* value by name (``from m import current_meta``) are
   treated the same way.

Not covered: state in C++, references to a value that are not module globals, and functions that
are being executed during the exchange (install before the threads start, remove after they have
ended). Modules without source, or whose source is not what runs, are an error, never a
half-done exchange.

A thread that Python did not start (an autograd engine thread) is a thread like any other: it
starts from the values at rest and sees nothing that the thread which called ``backward()`` set.
"""

from __future__ import annotations

import ast
import dis
import functools
import gc
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_STORE_NAME = "__thread_local_globals__"

_Position = tuple[int | None, int | None, int | None, int | None]


class StateError(RuntimeError):
    """The state cannot be made thread-local on this torch; the message says why."""


# -- values ------------------------------------------------------------------------------------


class _Store(threading.local):
    """One attribute per name; a new thread begins with the values at rest."""

    def __init__(self, rest: Mapping[str, Callable[[], Any]], watched: frozenset[str]) -> None:
        fields = self.__dict__
        fields["_watched"] = watched
        for name, make in rest.items():
            fields[name] = make()

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        if name in self._watched:
            _note_holder(name, bool(value))


class _Holder:
    """Stands for a thread, and dies with it: the system gives a dead thread's id out again."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.holder = _Holder()


_this_thread = _ThisThread()
# Which threads hold a watched flag. The readers need a count, not a snapshot.
_holders: dict[str, weakref.WeakSet[_Holder]] = {}


def _note_holder(name: str, held: bool) -> None:
    holders = _holders.setdefault(name, weakref.WeakSet())
    if held:
        holders.add(_this_thread.holder)
    else:
        holders.discard(_this_thread.holder)


def held_elsewhere(name: str) -> bool:
    """Whether a living thread other than the calling one holds the watched flag ``name``."""
    holders = _holders.get(name)
    if not holders:
        return False
    return len(holders) > (_this_thread.holder in holders)


# -- code --------------------------------------------------------------------------------------

_USES_GLOBAL = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}
_MAY_USE_GLOBAL = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}  # in a class body
_BY_NAME = _USES_GLOBAL | _MAY_USE_GLOBAL | {"STORE_NAME"}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_function(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _uses(code: types.CodeType, names: Mapping[str, str]) -> Iterator[tuple[str, _Position]]:
    """Each use of a global called one of ``names`` when the function ``code`` runs."""
    for part in _codes(code):
        wanted = names.keys() & set(part.co_names)
        if not wanted:
            continue
        instructions = [i for i in dis.get_instructions(part) if i.opname in _BY_NAME]
        own = {i.argval for i in instructions if i.opname == "STORE_NAME"}
        for instruction in instructions:
            name = instruction.argval
            if name not in wanted or instruction.opname == "STORE_NAME":
                continue
            if instruction.opname in _MAY_USE_GLOBAL and name in own:
                raise StateError(
                    f"{part.co_filename}:{part.co_firstlineno}: whether {name!r} is the class's "
                    "or the module's is only known when it runs"
                )
            where = instruction.positions
            yield name, tuple(where) if where else (None,) * 4  # type: ignore[misc]


def _functions_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The outermost functions in a module's code; what else is in there ran at import."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if _is_function(constant):
                yield constant
            else:
                yield from _functions_in(constant)


class _Rewriter(ast.NodeTransformer):
    """Replaces the names at the given places by attributes of the store."""

    def __init__(self, names: Mapping[str, str], places: set[tuple[str, _Position]]) -> None:
        self.names = names
        self.places = places

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        node.value = self.visit(node.value)  # := takes no attribute; a global target is refused
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        where = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        if (node.id, where) not in self.places:
            return node
        store = ast.copy_location(ast.Name(_STORE_NAME, ast.Load()), node)
        return ast.copy_location(ast.Attribute(store, self.names[node.id], node.ctx), node)


_Key = tuple[Any, ...]


def _key(code: types.CodeType) -> _Key:
    """What a function does and where it stands, but neither its file nor its columns."""
    constants = tuple(_key(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return (
        code.co_qualname,
        code.co_firstlineno,
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        constants,
    )


def _rewritten_codes(
    module: types.ModuleType, names: Mapping[str, str]
) -> dict[_Key, types.CodeType]:
    """Key of the code as it is -> code with the store, for functions that use one of ``names``."""
    try:
        source = inspect.getsource(module)
        file = module.__file__ or "<unknown>"
        plain = compile(source, file, "exec", dont_inherit=True)
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise StateError(
            f"{module.__name__}: its source cannot be read ({error}), so its state cannot be made "
            "thread-local"
        ) from error
    places = {use for function in _functions_in(plain) for use in _uses(function, names)}
    tree = _Rewriter(names, places).visit(tree)
    whole = compile(tree, file, "exec", dont_inherit=True)
    for function in _functions_in(whole):
        for name, where in _uses(function, names):
            raise StateError(
                f"{file}:{where[0]}: this use of {name!r} cannot be rewritten"
                + ("" if where[2] is not None else " without column positions")
            )
    return {
        _key(old): new
        for old, new in zip(_codes(plain), _codes(whole), strict=True)
        if any(_STORE_NAME in part.co_names for part in _codes(new))
    }


def _functions_of(modules: Mapping[types.ModuleType, object]) -> list[types.FunctionType]:
    """Every live function defined in ``modules``, decorated, nested or imported elsewhere."""
    namespaces = {id(vars(module)) for module in modules}
    frozen = gc.get_freeze_count() > 0  # frozen objects are not listed
    if frozen:
        gc.unfreeze()
    try:
        return [
            item
            for item in gc.get_objects()
            if type(item) is types.FunctionType and id(item.__globals__) in namespaces
        ]
    finally:
        if frozen:
            gc.freeze()


# -- the exchange ------------------------------------------------------------------------------


class ThreadLocalGlobals:
    """Gives each thread its own value of some globals of ``module``.

    Args:
        module: the module that defines the globals.
        rest: name -> factory of the value that a new thread starts with.
        watched: names of flags whose holders are counted (:func:`held_elsewhere`).
    """

    def __init__(
        self,
        module: types.ModuleType,
        rest: Mapping[str, Callable[[], Any]],
        watched: frozenset[str] = frozenset(),
    ) -> None:
        self.module = module
        self.rest = dict(rest)
        self.watched = watched
        self.store = _Store(self.rest, watched)
        self._undo: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raises :class:`StateError` where :meth:`install` would; changes nothing."""
        self._plan()

    def install(self) -> None:
        """Exchanges code, dictionary entries and module classes; undone by :meth:`remove`.

        Raises:
            StateError: a name is missing, the source cannot be read or is not what runs, or a
                use of a name cannot be exchanged. Nothing is changed then.
        """
        targets, exchanges = self._plan()
        try:
            for module, names in targets.items():
                self._install_module(module, names)
            for function, code in exchanges:
                self._undo.append(functools.partial(_set_code, function, function.__code__))
                _set_code(function, code)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Puts code, dictionaries and classes back, with the values from before the install."""
        while self._undo:
            self._undo.pop()()
        for name in self.watched:
            _holders.pop(name, None)

    def _plan(
        self,
    ) -> tuple[
        dict[types.ModuleType, dict[str, str]], list[tuple[types.FunctionType, types.CodeType]]
    ]:
        """Module -> {its name: the store's name}, and the functions with their new code."""
        targets = {self.module: {name: name for name in self.rest}}
        if _STORE_NAME not in vars(self.module):
            missing = [name for name in self.rest if name not in vars(self.module)]
            if missing:
                raise StateError(f"{self.module.__name__} has no global {', '.join(missing)}")
            for module, alias, name in self._aliases():
                targets.setdefault(module, {})[alias] = name
        for module in targets:
            if _STORE_NAME in vars(module):
                raise StateError(f"{module.__name__}: already thread-local")
        plans = {id(vars(module)): _rewritten_codes(module, targets[module]) for module in targets}
        names_of = {id(vars(module)): names for module, names in targets.items()}
        exchanges = []
        for function in _functions_of(targets):
            code = function.__code__
            new = plans[id(function.__globals__)].get(_key(code))
            if new is not None:
                exchanges.append((function, new))
            elif any(_uses(code, names_of[id(function.__globals__)])):
                raise StateError(
                    f"{function.__module__}.{function.__qualname__} is not what is in the "
                    "module's source"
                )
        return targets, exchanges

    def _aliases(self) -> Iterator[tuple[types.ModuleType, str, str]]:
        """Other modules that hold a reference to one of the mutable values."""
        values = {
            id(value): name
            for name in self.rest
            if isinstance(value := vars(self.module)[name], dict | list | set)
        }
        for module in list(sys.modules.values()):
            if module is self.module or not isinstance(module, types.ModuleType):
                continue
            for alias, value in list(vars(module).items()):
                if id(value) in values and not alias.startswith("__"):
                    yield module, alias, values[id(value)]

    def _install_module(self, module: types.ModuleType, names: Mapping[str, str]) -> None:
        plain_class = module.__class__
        saved = {alias: vars(module)[alias] for alias in names}

        def undo() -> None:
            module.__class__ = plain_class
            vars(module).update(saved)
            vars(module).pop(_STORE_NAME, None)

        self._undo.append(undo)
        properties = {alias: _store_property(self.store, name) for alias, name in names.items()}
        vars(module)[_STORE_NAME] = self.store
        module.__class__ = type("ThreadLocalModule", (plain_class,), properties)
        for alias in names:
            del vars(module)[alias]


def _store_property(store: _Store, name: str) -> property:
    return property(
        lambda _module: getattr(store, name),
        lambda _module, value: setattr(store, name, value),
        lambda _module: delattr(store, name),
    )


def _set_code(function: types.FunctionType, code: types.CodeType) -> None:
    function.__code__ = code
