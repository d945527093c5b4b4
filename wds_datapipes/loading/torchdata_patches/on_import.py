"""The import hook of this package, which patches torchdata when a program imports it.

So importing this package does not import torchdata. The hook also explains the names of other packages in
``from wds_datapipes import NAME``.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from wds_datapipes.foreign_names import explain_name

PACKAGE = __name__.partition(".")[0]


def watch_imports(act: Callable[[], object]) -> None:
    """Call a function once torchdata has been imported, which may be now; explain names of other packages from now on.

    Args:
        act: the function.
    """
    sys.meta_path.insert(0, ImportHook(act))
    if "torchdata" in sys.modules:
        act()


def has_dataloader2() -> bool:
    """Whether torchdata is installed with ``DataLoader2``; this does not import it."""
    name = "torchdata.dataloader2"
    for known in ("torchdata", name):
        if known in sys.modules and sys.modules[known] is None:
            return False
    if (spec := importlib.util.find_spec("torchdata")) is None:
        return False
    return _find(name, spec.submodule_search_locations) is not None


@contextmanager
def silence_banner() -> Any:
    """Silence torchdata's banner about the deprecation of its datapipes."""
    with warnings.catch_warnings():
        banner = r"\n#+\nWARNING!\nThe 'datapipes', 'dataloader2' modules are deprecated"
        warnings.filterwarnings("ignore", message=banner, category=UserWarning)
        yield


def _find(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None, *, without: object = None
) -> ModuleSpec | None:
    """Find a module as ``import`` does, without one of the finders."""
    # Until Python 3.12, finders such as that of six 1.15 may have only find_module.
    finders = (each for each in sys.meta_path if each is not without and hasattr(each, "find_spec"))
    return next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)


class ImportHook(MetaPathFinder):
    """Finds torchdata as other finders do, with a loader that calls a function afterwards.

    Args:
        act: the function.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torchdata, and none of other modules.

        Raises:
            ImportError: the program imports a name of another package from this one. ``from wds_datapipes import NAME``
                drops the error of ``__getattr__``, and looks for a module of this name.
        """
        package, _, name = fullname.partition(".")
        if package == PACKAGE and (advice := explain_name(name)):
            raise ImportError(f"cannot import name {name!r} from {package!r}{advice}", name=package)
        if fullname != "torchdata":
            return None
        spec = _find(fullname, path, target, without=self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(Loader):
    """Loads a module as another loader does, and calls a function afterwards."""

    def __init__(self, loader: Any, act: Callable[[], object]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with silence_banner():
            self._loader.exec_module(module)
        self._act()
