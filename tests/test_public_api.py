"""The public names of the package, and their documentation."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

import wds_datapipes
from wds_datapipes import errors, index, pipes, testing, writing

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(wds_datapipes.__path__, "wds_datapipes.")
    if "__main__" not in module.name
    # Only with DALI, or with a torchdata that lacks DataLoader2.
    and (module.name != "wds_datapipes.integrations.dali" or find_spec("nvidia"))
    and (module.name != "wds_datapipes.integrations.nodes" or find_spec("torchdata.nodes"))
)
STAGES = {
    name: stage
    for name, function in IterDataPipe.functions.items()
    if (stage := getattr(function, "__wrapped__", None)) and stage.__module__.startswith("wds_datapipes.")
}


def public_objects() -> Iterator[tuple[str, Any]]:
    """The public names of the modules that users import from, and the methods of the classes among them."""
    for module in (wds_datapipes, errors, index, pipes, testing, writing):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value) and value.__module__.startswith("wds_datapipes"):
                for attribute, member in vars(value).items():
                    if inspect.isfunction(member) and not attribute.startswith("_"):
                        yield f"{module.__name__}.{name}.{attribute}", member


def test_all_is_sorted_and_complete() -> None:
    visible = {
        name
        for name, value in vars(wds_datapipes).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } | wds_datapipes._LATER.keys()
    assert wds_datapipes.__all__ == sorted(visible)


def test_everything_public_has_a_docstring() -> None:
    # A docstring of the class itself, because an inherited one describes something else.
    assert [name for name, value in public_objects() if not (value.__doc__ or "").strip()] == []
    assert {"load_wds_shards", "group_samples", "wds_decode"} <= set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_public_and_documented(name: str) -> None:
    stage = STAGES[name]
    assert getattr(pipes, stage.__name__) is stage
    text = inspect.getdoc(stage) or ""
    assert f"(functional name: ``{name}``)." in text.partition("\n\n")[0]
    assert "\nYields:\n" in text
    assert ">>> " in text
    # The text that help() shows for the functional form.
    assert getattr(IterDataPipe.functions[name], "__doc__", None) == stage.__doc__
    arguments = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    told = {word for line in re.findall(r"(?m)^    (\S.*?):", arguments) for word in line.split(", ")}
    _, source, *_ = parameters = inspect.signature(stage.__init__).parameters
    assert told == set(parameters) - {"self"}
    assert (source, parameters[source].default) == ("source", inspect.Parameter.empty)


def test_type_checkers_see_the_stages_that_are_imported_at_first_use() -> None:
    tree = ast.parse(inspect.getsource(pipes))
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    seen = {alias.asname: each.module for each in imports for alias in each.names if alias.asname}
    assert seen == {name: getattr(pipes, name).__module__ for name in pipes.__all__}


def test_a_new_process_imports_little_and_lists_all_names() -> None:
    """`tests/checks/import_time.py` measures what the first part is for."""
    code = """
import sys
import wds_datapipes as package
print(*sys.modules)
print(*{*package.__all__, "__version__"} - {*dir(package)})
from torch.utils.data import IterDataPipe
own = {name for name, build in IterDataPipe.functions.items() if "wds_datapipes" in build.__wrapped__.__module__}
for name in own:
    del IterDataPipe.functions[name]
import torchdata.datapipes.iter
print(*own & {*IterDataPipe.functions, *dir(IterDataPipe)})
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    modules, unlisted, taken = done.stdout.split("\n")[:3]
    loaded = set(modules.split())
    own = {name for name in loaded if name.partition(".")[0] == "wds_datapipes"}
    # 75 of 381, with 10,300 lines. Before you raise this, look whether a new module can be imported at first use.
    assert len(own) <= 76
    assert "wds_datapipes.pipes.stage" in own
    modules_of_stages = {stage.__module__ for stage in STAGES.values()}
    assert "wds_datapipes.pipes.shards.load_wds_shards" in modules_of_stages
    unneeded = {"PIL", "html.parser", "sqlite3", "wds_datapipes.index", "wds_datapipes.io.remote.filesystem"}
    unneeded |= {"wds_datapipes.tools", "wds_datapipes.shard_cache", "wds_datapipes.writing", *modules_of_stages}
    assert loaded & unneeded == set()
    assert (unlisted, taken) == ("", "")
