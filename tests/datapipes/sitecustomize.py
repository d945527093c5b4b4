"""Turns the installed torch into a release without datapipes, or one that warns of them, in a program and its workers.

Python imports this module when it starts, if its folder is in ``PYTHONPATH``. ``TORCH_DATAPIPES`` is ``gone`` or
``deprecated``.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

MODULES = ("torch.utils.data.datapipes", "torch.utils.data.graph", "torch.utils.data.graph_settings")
#: The modules of torch that import from those.
USERS = ("torch.utils.data", "torch.utils.data.dataloader", "torch.utils.data._utils.worker")
#: What a deprecation may do: warn when the module is imported, and when a class is derived.
WARNINGS = """
import warnings
warnings.warn("torch.utils.data.datapipes is deprecated", UserWarning, stacklevel=2)
warn = lambda cls, **_: warnings.warn("DataPipes are deprecated, and will be removed", FutureWarning, stacklevel=2)
IterDataPipe.__init_subclass__ = classmethod(warn)
"""


class WithoutDatapipes(ast.NodeTransformer):
    """Removes imports of datapipes. torch's ``DataLoader`` then asks for classes that no dataset has."""

    def visit_Import(self, node: ast.Import) -> Any:
        return None if any(alias.name.startswith(MODULES) for alias in node.names) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        names = [alias.name for alias in node.names]
        if not (node.module or "").startswith(MODULES) and "IterDataPipe" not in names:
            return node
        return [each for name in names for each in ast.parse(f"{name} = type({name!r}, (), {{}})").body]


class Release(SourceFileLoader):
    """Loads a module of this release; never from a cache of code, nor into one."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        if os.environ["TORCH_DATAPIPES"] == "gone":
            tree = WithoutDatapipes().visit(tree)
            if fullname == "torch.utils.data":
                tree.body += ast.parse("del IterDataPipe, MapDataPipe, functional_datapipe").body
        elif fullname == "torch.utils.data":
            tree.body += ast.parse(WARNINGS).body
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if os.environ["TORCH_DATAPIPES"] == "gone" and fullname.startswith(MODULES):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        spec = PathFinder.find_spec(fullname, path) if fullname in USERS else None
        if spec is not None:
            spec.loader = Release(fullname, str(spec.origin))
        return spec


sys.meta_path.insert(0, Finder())
