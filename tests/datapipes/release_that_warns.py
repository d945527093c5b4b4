"""Turns the installed torch into a release that warns of datapipes, in a program and its workers.

``tests/programs/sitecustomize.py`` imports this module when a program starts, if ``IMPORTED_FIRST`` names it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

#: What a deprecation may do: warn when the module is imported, and when a class is derived.
WARNINGS = """
import warnings
warnings.warn("torch.utils.data.datapipes is deprecated", UserWarning, stacklevel=2)
warn = lambda cls, **_: warnings.warn("DataPipes are deprecated, and will be removed", FutureWarning, stacklevel=2)
IterDataPipe.__init_subclass__ = classmethod(warn)
"""


class Release(SourceFileLoader):
    """Loads ``torch.utils.data`` of this release; never from a cache of code, nor into one."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        tree.body += ast.parse(WARNINGS).body
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "torch.utils.data" else None
        if spec is not None:
            spec.loader = Release(fullname, str(spec.origin))
        return spec


sys.meta_path.insert(0, Finder())
