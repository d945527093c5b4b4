"""Patches torchdata when a program imports it, so that importing this package does not import torchdata.

torchdata registers its stages when it is imported. The first use of the name of one of them therefore imports it, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The stages that torchdata 0.7.1 to 0.9.0 register.
STAGES = frozenset(
    {
        *("add_index", "async_map_batches", "bucketbatch", "check_hash", "cycle", "dataframe", "decompress", "drop"),
        *("end_caching", "enumerate", "extract", "flatmap", "flatten", "fullsync", "header", "in_batch_shuffle"),
        *(
            "in_memory_cache",
            "lines_to_paragraphs",
            "list_files_by_ais",
            "list_files_by_fsspec",
            "list_files_by_iopath",
        ),
        *("list_files_by_s3", "load_files_by_ais", "load_files_by_s3", "load_from_bz2", "load_from_rar"),
        *("load_from_tar", "load_from_tfrecord", "load_from_xz", "load_from_zip", "load_parquet_as_df", "map_batches"),
        *("max_token_bucketize", "memory_cell", "mux_longest", "on_disk_cache", "open_files_by_fsspec"),
        *("open_files_by_iopath", "parse_csv", "parse_csv_as_dict", "parse_json_files", "pin_memory", "prefetch"),
        *("random_split", "read_from_gdrive", "read_from_http", "read_from_remote", "readlines", "repeat"),
        *("round_robin_demux", "rows2columnar", "save_by_fsspec", "save_by_iopath", "save_to_disk", "set_length"),
        *("shard_expand", "sharding_round_robin_dispatch", "shuffled_flatmap", "slice", "threadpool_map"),
        *("to_iter_datapipe", "to_map_datapipe", "unzip", "webdataset", "zip_longest", "zip_with_iter", "zip_with_map"),
    }
)


def on_import(package: str, act: Callable[[], object]) -> None:
    """Call a function once a package has been imported: now, if it is already.

    Args:
        package: the name of a package without a dot.
        act: the function.
    """
    if package in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _TorchdataFinder(package, act))


def has_dataloader2() -> bool:
    """Whether torchdata is installed with ``DataLoader2``; this does not import it."""
    name = "torchdata.dataloader2"
    for known in ("torchdata", name):
        if known in sys.modules and sys.modules[known] is None:
            return False
    if (spec := importlib.util.find_spec("torchdata")) is None:
        return False
    return _find(name, spec.submodule_search_locations) is not None


def import_stages() -> bool:
    """Import torchdata's stages, which registers them; return whether it was not imported before and is installed."""
    if "torchdata" in sys.modules:
        return False
    try:
        importlib.import_module("torchdata.datapipes")
    except ImportError:
        return False
    return True


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


class _TorchdataFinder(MetaPathFinder):
    """Finds a package as other finders do, with a loader that calls a function afterwards."""

    def __init__(self, package: str, act: Callable[[], object]) -> None:
        self._package = package
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package:
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
