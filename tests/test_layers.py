"""The imports and actions allowed in each package of `wds_datapipes`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "wds_datapipes"
PAGE = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = PAGE.partition("| package | contents |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
LISTED = [name for row in ROWS for name in re.findall(r"`([a-z_/]+?)/?`", row.split("|")[1])]
#: From low to high: a module imports from its own package and from those before it. ``__init__`` has the public names.
ORDER = [*LISTED[:-1], "__init__", "tools", "tools/cli", "runs", "__main__"]
MODULES = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    """The package, or the module at the top, of ``wds_datapipes.tar.reader`` or ``wds_datapipes/tar/reader.py``."""
    parts = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".").split(".")
    if parts[1:2] == ["tools"]:
        return "/".join(parts[1:3])
    return parts[1] if len(parts) > 1 else "__init__"


def level(module: str) -> int:
    name = package_of(module)
    return ORDER.index(name if name in ORDER else "__init__")


#: Modules that work without torch.
TORCH_FREE = [
    name
    for name in MODULES
    if level(name) <= ORDER.index("writing") or package_of(name) in ("tools/interop", "tools/prepare")
]
LOWER = [name for name in MODULES if level(name) <= ORDER.index("pipes") or name in TORCH_FREE]
#: Names of a package that importing it does not load.
LATER = {"wds_datapipes/index/__init__.py": "wds_datapipes.tools.interop."}
#: Names of libraries that only few modules import, so that a release that moves them affects only these.
ADAPTED = {
    r"torch\.utils\.data\.(datapipes|graph|graph_settings|IterDataPipe|MapDataPipe|functional_datapipe)\b": [
        "wds_datapipes/datapipes/__init__.py"
    ],
    r"torchdata\.(?!nodes\b|stateful_dataloader\b)": [
        "wds_datapipes/loading/torchdata_api.py",
        "wds_datapipes/loading/torchdata_patches/",
    ],
}


@cache
def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), name)


def imported(statements: ast.AST) -> Iterator[str]:
    """The full names of everything imported anywhere in some code."""
    for node in ast.walk(statements):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            # A name may be a module of the package that it is taken from.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_at_import(module: ast.Module) -> Iterator[str]:
    """The full names of everything imported when the module itself is imported."""
    for statement in module.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from imported(statement)


def packages(names: Iterator[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_imports_point_down() -> None:
    for name in MODULES:
        own = [found for found in imported(parse(name)) if found.partition(".")[0] == "wds_datapipes"]
        above = [found for found in own if level(found) > level(name) and not found.startswith(LATER.get(name, "-"))]
        assert not above, f"{name} stands below what it imports: {above}"


def test_rooms_of_the_index_import_those_before_them() -> None:
    rooms = ["format", "order", "read"]
    for name in MODULES:
        if package_of(name) == "index" and (room := name.split("/")[2]) in rooms:
            own = [found.split(".")[2] for found in imported(parse(name)) if package_of(found) == "index"]
            above = {each for each in own if rooms.index(each) > rooms.index(room)}
            # User columns are computed from samples, which are read by the index without them.
            assert above == ({"read"} if name.endswith("format/user_columns.py") else set()), name


def test_each_package_has_a_layer() -> None:
    assert LISTED[-1] == "tools/cli"
    assert {package_of(name) for name in MODULES} == set(ORDER)


def test_torch_is_imported_only_in_functions_and_torchdata_nowhere() -> None:
    for name in LOWER:
        assert "torchdata" not in packages(imported(parse(name))), name
        assert name not in TORCH_FREE or "torch" not in packages(imported_at_import(parse(name))), name


def test_datapipes_of_torch_are_imported_by_the_modules_that_adapt_them() -> None:
    for pattern, modules in ADAPTED.items():
        users = [name for name in MODULES if any(re.match(pattern, found) for found in imported(parse(name)))]
        others = [name for name in users if not name.startswith(tuple(modules))]
        assert modules[0] in users
        assert not others, f"{others} import what {modules[0]} adapts"


def test_no_named_tuple_is_generic_which_python_3_10_refuses_at_import() -> None:
    classes = [node for name in MODULES for node in ast.walk(parse(name)) if isinstance(node, ast.ClassDef)]
    bases = [{ast.unparse(base).partition("[")[0] for base in found.bases} for found in classes]
    assert len(bases) > 100
    assert not [found.name for found, some in zip(classes, bases, strict=True) if {"NamedTuple", "Generic"} <= some]


def test_lower_packages_do_not_print_sleep_or_read_the_environment() -> None:
    # A variable turns patches off; ShardList and DatasetSpec expand variables; DirectoryShards, ranks of a host and
    # refused requests wait.
    exceptions = {
        "wds_datapipes/pipes/foreign_calls.py": {"os.environ"},
        "wds_datapipes/pipes/shards/shard_list.py": {"os.environ"},
        "wds_datapipes/pipes/shards/dataset_spec.py": {"os.environ"},
        "wds_datapipes/pipes/shards/cache_wds_shards.py": {"os.environ"},
        "wds_datapipes/shards/directory_queue.py": {"time.sleep"},
        "wds_datapipes/io/once_per_host.py": {"time.sleep"},
        "wds_datapipes/io/remote/retry.py": {"time.sleep"},
    }
    restricted = {"print", "sleep", "time.sleep", "os.environ", "environ", "os.getenv", "getenv"}
    for name in LOWER:
        named = {ast.unparse(node) for node in ast.walk(parse(name)) if isinstance(node, ast.Name | ast.Attribute)}
        assert named & restricted == exceptions.get(name, set()), name


def test_lower_packages_are_imported_without_torch() -> None:
    """All of them are imported in a new process, without the ``__init__`` of the package, which registers stages."""
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in TORCH_FREE]
    code = f"""
import importlib, sys, types
package = types.ModuleType("wds_datapipes")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["wds_datapipes"] = package
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "paramiko":  # of the extra "sftp"
            raise
print(sorted({{"torch", "torchdata"}} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.stdout, finished.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("page", "module"), [("engine", "io/timeouts.py"), ("why-no-library-here", "loading/transport/")]
)
def test_a_page_about_the_code_names_modules_that_exist(page: str, module: str) -> None:
    text = (PACKAGE.parent / f"docs/explanation/{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*/(?:[a-z_]+\.py)?)`", text)
    assert module in named
    assert [name for name in named if not (PACKAGE / name).exists()] == []
