"""What ``import wds_datapipes`` changes of torch: it registers names, and patches two functions."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

#: Records the attributes of all classes and modules of torch.utils.data before and after the import.
PROGRAM = """
import importlib, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import torch.utils.data
for module in pkgutil.walk_packages(torch.utils.data.__path__, "torch.utils.data.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ImportError:  # of an optional package
        pass

NAMES = "functions"  # the registry of functional names

def facts():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not (name + ".").startswith("torch.utils.data."):
            continue
        for key, value in vars(module).items():
            if key not in ("__builtins__", "__warningregistry__"):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.startswith("torch.utils.data"):
                path = f"class {value.__module__}.{value.__qualname__}"
                found.update({f"{path}.{attribute}": each for attribute, each in vars(value).items()})
                found.update({f"{path}.{NAMES}[{each!r}]": make for each, make in vars(value).get(NAMES, {}).items()})
    return found

before = facts()
finders = list(sys.meta_path)
import wds_datapipes
after = facts()
same = lambda name: name in after and after[name] is before[name]
print(json.dumps({
    "changed": sorted(name for name in before if not same(name)),
    "added": sorted(name for name in after.keys() - before.keys()),
    "finders": [type(each).__name__ for each in sys.meta_path if each not in finders],
    "classes": len({name.partition(".")[0] + name for name in before if name.startswith("class ")}),
    "torchdata": "torchdata" in sys.modules,
}))
"""


def run(setup: str = "") -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", setup + PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_class_of_torch_is_changed_and_names_are_registered() -> None:
    found = run()
    assert found["classes"] > 500  # attributes
    assert found["changed"] == [
        "torch.utils.data.graph._list_connected_datapipes",
        "torch.utils.data.graph_settings.apply_random_seed",
    ]
    registered = [name for name in found["added"] if ".functions[" in name]
    assert found["added"] == registered
    assert "class torch.utils.data.datapipes.datapipe.IterDataPipe.functions['load_wds_shards']" in registered
    assert found["finders"] == ["ImportHook"]
    assert not found["torchdata"]


def test_without_patches_only_names_are_registered() -> None:
    found = run("import os; os.environ['WDS_DATAPIPES_PATCHES'] = '0'\n")
    assert found["changed"] == []
    assert all(".functions[" in name for name in found["added"])


def test_a_program_of_the_tests_begins_without_modules_that_it_might_have_forgotten_to_import() -> None:
    def modules(*options: str) -> set[str]:
        command = [sys.executable, *options, "-c", "import sys; print(*sys.modules)"]
        return {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}

    added = modules() - modules("-E")  # which ignores PYTHONPATH
    assert "sitecustomize" in added
    assert added.isdisjoint({"collections", "contextlib", "importlib.abc", "re", "tempfile", "typing"})
