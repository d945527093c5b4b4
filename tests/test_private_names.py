"""Private names of other libraries are used only in the module that adapts the library, and exist in all releases.

Tests use few of our own.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "wds_datapipes"
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TESTS = Path(__file__).parent
#: How often tests may use a private attribute of an object of ours.
MOST_REACHES = 20
PRIVATE = re.compile(r"_[A-Za-z]\w*")
#: Names that are documented despite the underscore, or stable as long as their class exists.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}


class Adapted(NamedTuple):
    """Private names of a library.

    Attributes:
        names: the names, each with its location; "" if it belongs to an object that is not created
            here, or that an adapting module adds.
        modules: the modules that use them, or folders of modules.
        why: the purpose that no public name serves.
    """

    names: dict[str, str]
    modules: tuple[str, ...]
    why: str


LOADER = "torchdata.dataloader2:DataLoader2([])"
SEEDS = "torchdata.dataloader2.random:SeedGenerator(1)"
SERIALIZATION = "torchdata.dataloader2.graph:_serialization"
TABLE = [
    Adapted(
        dict.fromkeys(("_number_of_samples_yielded", "_valid_iterator_id"), "torch.utils.data:IterDataPipe()")
        | {"_snapshot_state": "torch.utils.data:IterDataPipe()", "_fast_forward_iterator": ""}
        | {"_uuid": "", "_enabled": "", "_buffer": ""},
        ("datapipes/iteration.py", "pipes/inspection.py", "pipes/shards/shuffle.py", "pipes/state/"),
        "how many items torch has seen a stage yield, and what changes while a stage is iterated",
    ),
    Adapted(
        {"_get_default_store": "torch.distributed.distributed_c10d:_get_default_store"},
        ("io/once_per_host.py", "loading/distributed.py"),
        "the store that ranks meet at",
    ),
    Adapted(
        {"_get_sequence_number_for_group": "torch.distributed:ProcessGroup"},
        ("io/once_per_host.py",),
        "how many collective operations the ranks have had",
    ),
    Adapted(
        dict.fromkeys(("_iterator", "_IterableDataset_len_called"), "torch.utils.data:DataLoader([])"),
        (
            "loading/stateful_dataset/dataset_loop.py",
            "loading/stateful_dataset/tracking.py",
            "loading/torchdata_patches/patches.py",
        ),
        "the iterator of a DataLoader that keeps its workers, and the length that it warns of",
    ),
    Adapted(
        {"_initial_iter_for_state_dict": "torchdata.stateful_dataloader:StatefulDataLoader([])"},
        ("loading/torchdata_patches/patches.py",),
        "whether the iterator of a StatefulDataLoader has begun",
    ),
    Adapted(
        {"_list_connected_datapipes": "torch.utils.data.graph:_list_connected_datapipes"},
        ("datapipes/traversal.py",),
        "the traversal of a pipeline, which two threads must not do at once",
    ),
    Adapted(
        {"_profiler_enabled": "torch.autograd:_profiler_enabled"},
        ("datapipes/iteration.py",),
        "whether an iteration is being profiled",
    ),
    Adapted({"_utils": "torch.utils.data:_utils.pin_memory.pin_memory"}, ("loading/service/pinning.py",), "pin_memory"),
    Adapted(
        {"_serialization": SERIALIZATION, "_find_replicable_branches": "torchdata.dataloader2.graph.utils:"}
        | {"_DummyIterDataPipe": "torchdata.dataloader2.utils.dispatch:"},
        ("loading/torchdata_api.py", "pipes/foreign_stages.py"),
        "how torchdata copies a pipeline and splits it for workers",
    ),
    Adapted(
        dict.fromkeys(("_adapted", "_datapipe_iter", "_datapipe_before_reading_service_adapt", "_is_paused"), LOADER)
        | dict.fromkeys(("_reset_iter", "_reset_seed"), LOADER)
        | {"_restarts": ""},
        ("loading/service/loader.py",),
        "the states, set_epoch and the length that DataLoader2 lacks",
    ),
    Adapted(
        {"_get_torch_random_seed": "torchdata.dataloader2.random.seed_generator:"},
        ("loading/torchdata_patches/",),
        "the seed of a DataLoader2 without one",
    ),
    Adapted(
        {"_apply_fn": "torch.utils.data.datapipes.iter:Collator([])"},
        ("pipes/foreign_calls.py", "pipes/inspection.py"),
        "the batch that torch's .collate() refuses",
    ),
    Adapted({"_utils": "torch._utils:ExceptionWrapper"}, ("loading/transport/serialization.py",), "sent exceptions"),
    Adapted(
        dict.fromkeys(("_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_DYNAMIC_CLASS_TRACKER_BY_ID"), ""),  # of the extra ray
        ("loading/transport/serialization.py",),
        "how a worker on another host refers to a class of the main program",
    ),
    Adapted(
        {"_shared_rng": SEEDS, "_worker_rng": SEEDS, "_ctr": "", "_generated_seeds": ""},
        ("seeds.py",),
        "where a seed generator is",
    ),
    Adapted(
        {"_children": "multiprocessing.process:_children", "_popen": "multiprocessing:Process()"},
        ("loading/workers/shutdown.py",),
        "processes that another thread has waited for, and that a fork must not end",
    ),
    Adapted(
        {"_shutdown": "concurrent.futures.thread:", "_threads_queues": "concurrent.futures.thread:"},
        ("loading/workers/connection.py",),
        "whether the interpreter waits for this thread",
    ),
    Adapted(
        {"_cache": "fsspec:AbstractFileSystem._cache"}, ("io/remote/filesystem.py",), "the instances that fsspec keeps"
    ),
    Adapted(
        dict.fromkeys(("_snapshot", "_snapshot_step", "_steps_since_snapshot", "_worker_snapshots"), "")
        | dict.fromkeys(("_iterator_finished", "_last_yielded_worker_id", "_num_yielded"), ""),
        ("loading/checkpoint/format.py", "loading/stateful_dataset/loader_states.py"),
        "keys of the states of StatefulDataLoader, which tests of these states guard",
    ),
]


def resolve(path: str, name: str) -> Any:
    """Return the object at a path such as ``module:Class().attribute``; without an attribute, its ``name``."""
    module, _, expression = path.partition(":")
    found = importlib.import_module(module)
    for part in filter(None, (expression or name).split(".")):
        call = re.fullmatch(r"(\w+)\((.*)\)", part)
        found = (
            getattr(found, call[1])(*ast.literal_eval(f"({call[2]},)" if call[2] else "()"))
            if call
            else getattr(found, part)
        )
    return found


@pytest.mark.parametrize(
    ("name", "path", "modules"),
    [(name, path, each.modules) for each in TABLE for name, path in each.names.items() if path],
)
def test_a_private_name_exists(name: str, path: str, modules: tuple[str, ...]) -> None:
    message = f"{path} has no {name} in this release: adapt {', '.join(modules)}"
    try:
        found = resolve(path, name)
    except AttributeError:
        pytest.fail(message)
    is_end = name in path or path.endswith(":") or name == "_utils"
    assert is_end or hasattr(found, name), message


def names_defined(tree: ast.Module) -> set[str]:
    """The names that a module gives to functions, classes, fields and attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def names_used(tree: ast.Module) -> Iterator[str]:
    """The private names that a module takes from other objects and modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] != "wds_datapipes":
            yield from (part for alias in node.names for part in (*str(node.module).split("."), alias.name))
        elif isinstance(node, ast.Constant) and node.value in TABLED - {"_thread"}:  # which is a module, too
            yield node.value


TABLED = {name for each in TABLE for name in each.names}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8"), name) for name, path in MODULES.items()}


@cache
def defined() -> dict[str, set[str]]:
    return {name: names_defined(tree) for name, tree in trees().items()}


def test_private_names_are_used_only_where_they_are_adapted() -> None:
    own = set().union(*defined().values())
    for module in MODULES:
        allowed = {name for each in TABLE if module.startswith(each.modules) for name in each.names}
        used = (
            {name for name in names_used(trees()[module]) if PRIVATE.fullmatch(name)} - DOCUMENTED - defined()[module]
        )
        foreign = {name for name in used if name in TABLED or name not in own}
        assert foreign <= allowed, f"{module}: private names of other libraries belong where they are adapted"


def test_each_private_name_is_used() -> None:
    for each in TABLE:
        users = [module for module in MODULES if module.startswith(each.modules)]
        for name in each.names:
            own = {node.attr for user in users for node in ast.walk(trees()[user]) if isinstance(node, ast.Attribute)}
            assert name in own or any(name in set(names_used(trees()[user])) | defined()[user] for user in users), name


def reaches(path: Path) -> Iterator[str]:
    """The lines at which a module of tests uses a private attribute of ours, such as ``loader._pool``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = (
        set().union(*defined().values()) - names_defined(tree) - TABLED - DOCUMENTED - {"_pause", "_resume"}
    )  # torch's
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr in own:
            yield f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node)}"


def test_tests_use_few_private_attributes() -> None:
    """They go through public names, or the interfaces between packages."""
    found = [line for path in sorted(TESTS.rglob("*.py")) for line in reaches(path)]
    assert len(found) <= MOST_REACHES, "\n".join(found)
