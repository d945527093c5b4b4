"""What each floor of the package may import and do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "wds_datapipes"
#: Low to high: a module imports from its own floor and from those below it. What is not named stands above all.
FLOORS = ["errors", "core", "pipes", "reading"]
MODULES = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
LOWER = [name for name in MODULES if name.split("/")[1] in ("core", "pipes")]


def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), name)


def floor(module: str) -> int:
    """The floor of ``wds_datapipes.core.tar`` or ``wds_datapipes/core/tar.py``."""
    parts = module.removesuffix(".py").replace("/", ".").split(".")
    return FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] in FLOORS else len(FLOORS)


def imported(statements: ast.AST) -> Iterator[str]:
    """The full names of all that is imported anywhere in some code."""
    for node in ast.walk(statements):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            # A name may be a module of the package that it is taken from.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_at_import(module: ast.Module) -> Iterator[str]:
    """The full names of what is imported when the module itself is."""
    for statement in module.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from imported(statement)


def packages(names: Iterator[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    above = {
        found
        for found in imported(parse(name))
        if found.partition(".")[0] == "wds_datapipes" and floor(found) > floor(name)
    }
    assert not above, f"{name} stands below what it imports: {sorted(above)}"


def test_the_floors_are_there() -> None:
    assert {floor(name) for name in MODULES} == set(range(len(FLOORS) + 1))


@pytest.mark.parametrize("name", [name for name in LOWER if "/core/" in name])
def test_core_imports_torch_in_functions_alone(name: str) -> None:
    assert not packages(imported_at_import(parse(name))) & {"torch", "torchdata"}


@pytest.mark.parametrize("name", [*LOWER, "wds_datapipes/errors.py", "wds_datapipes/testing.py"])
def test_torchdata_is_not_needed_for_the_stages(name: str) -> None:
    assert "torchdata" not in packages(imported(parse(name)))


@pytest.mark.parametrize("name", LOWER)
def test_the_lower_floors_do_not_print_sleep_or_look_at_the_environment(name: str) -> None:
    # ShardList and DatasetSpec put variables in; DirectoryShards waits for files, and what was refused for a store.
    exceptions = {
        "wds_datapipes/pipes/shards.py": {"os.environ"},
        "wds_datapipes/pipes/shardcache.py": {"os.environ"},
        "wds_datapipes/core/claims.py": {"time.sleep"},
        "wds_datapipes/core/openers/patience.py": {"time.sleep"},
    }
    allowed = exceptions.get(name, set())
    found = {ast.unparse(node) for node in ast.walk(parse(name)) if isinstance(node, ast.Name | ast.Attribute)} & {
        "print",
        "sleep",
        "time.sleep",
        "os.environ",
        "environ",
        "os.getenv",
        "getenv",
    }
    assert found == allowed


def test_core_runs_without_torch() -> None:
    """All of core is imported in a new process, below a package whose ``__init__`` does not run."""
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in LOWER if "/core/" in name
    ]
    code = f"""
import importlib, sys, types
package = types.ModuleType("wds_datapipes")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["wds_datapipes"] = package
for name in {modules!r}:
    importlib.import_module(name)
print(sorted({{"torch", "torchdata"}} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.stdout, finished.stderr) == ("[]\n", "")
