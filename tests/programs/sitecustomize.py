"""Imports torch without garbage collections in the programs that tests start, and in their workers.

Python imports this module when it starts, as its folder is in the ``PYTHONPATH`` of the tests. The import creates
hundreds of thousands of objects that live as long as the program. To search them for garbage, meanwhile and at exit,
takes a third of the time of a short program. What a program creates after the import is collected as always.

Only modules that Python needs itself are imported here, because tests look at those that a program imports.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class Uncollected(SourceFileLoader):
    """Imports a module, and exempts all that exists then from garbage collection."""

    def exec_module(self, module: ModuleType) -> None:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
            gc.freeze()
        finally:
            if is_enabled:
                gc.enable()


class Finder:
    """Finds torch once."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Uncollected(fullname, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder())
if first := os.environ.get("IMPORTED_FIRST"):
    importlib.import_module(first)
