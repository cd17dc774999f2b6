"""Calls back once when certain modules have been imported, without importing them.

A finder in front of ``sys.meta_path`` lets the others find the module and hangs a call behind its
loader's ``exec_module``. It takes itself away when it is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Arrival:
    """``Arrival(["torch", "torch._dynamo"], then).watch()``: ``then()`` once both are imported.

    ``then`` runs in the importing thread, inside the import of the last one. A module whose
    import fails has not arrived; it may be tried again.
    """

    def __init__(self, names: Iterable[str], then: Callable[[], None]) -> None:
        self._missing = {name for name in names if not _imported(name)}
        self._then = then

    def watch(self) -> None:
        """Calls at once when everything is there already."""
        if self._missing:
            sys.meta_path.insert(0, self)
        else:
            self._then()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name not in self._missing:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                self._hang_behind(name, spec.loader)
                return spec
        return None

    def _hang_behind(self, name: str, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's own is back, whatever happens
            execute(module)
            self._arrived(name)

        loader.exec_module = exec_module

    def _arrived(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


def _imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
