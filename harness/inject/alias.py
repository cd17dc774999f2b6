"""Loads this package inside a foreign interpreter under the name ``_race_harness``.

The program may have a package called ``harness`` itself, and its environment need not have ours.
So our files are found by their place, never by ``sys.path``, and ``harness`` in their imports is
renamed when they are compiled; nothing of that is written to a bytecode cache. The package's
``__init__`` is not run: it is for people who import the harness, and costs imports.

Only ``from harness...`` imports are renamed; that is the only form in this package.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

NAME, ORIGINAL = "_race_harness", "harness"


def load(package: str, module: str) -> Any:
    """Imports ``module`` (dotted, below the package folder ``package``) under the private name."""
    if NAME not in sys.modules:
        root = types.ModuleType(NAME)
        root.__path__ = [package]
        sys.modules[NAME] = root
        sys.meta_path.insert(0, _Finder(package))  # before the one that goes by __path__
    return importlib.import_module(f"{NAME}.{module}")


class _Finder:
    """Finds ``_race_harness.*`` by file."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self,
        name: str,
        _path: Sequence[str] | None = None,
        _target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(NAME + "."):
            return None
        base = os.path.join(self._package, *name.split(".")[1:])
        inside = os.path.join(base, "__init__.py")
        folder = os.path.exists(inside)
        file = inside if folder else base + ".py"
        if not os.path.exists(file):
            return None
        return importlib.util.spec_from_file_location(
            name,
            file,
            loader=_Loader(name, file),
            submodule_search_locations=[base] if folder else None,
        )


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file with our name exchanged; line numbers stay."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                head, dot, rest = node.module.partition(".")
                if head == ORIGINAL:
                    node.module = NAME + dot + rest
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code
