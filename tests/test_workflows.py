"""The files around the repository: workflows run sessions that exist, on each Python, and name no package index."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_blocks import ROOT
from parts_of_tests import files_of_part

WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github/workflows").iterdir())}
OTHERS = [*(ROOT / ".github").rglob("*.yaml"), ROOT / ".pre-commit-config.yaml", ROOT / ".readthedocs.yaml"]
#: What nox calls a session, and its parameters.
SESSION = re.compile(r'"?(\w+)(?:\(([\w.-]+)\))?"?')
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))


def read(path: Path) -> Any:
    """Return the content of a file, in which the key ``on`` is not True."""
    return yaml.load(path.read_text("utf-8"), yaml.BaseLoader)  # which makes only strings


def sessions() -> dict[str, str]:
    """Return the sessions of the noxfile, with the text of their parameters."""
    return {
        node.name: " ".join(map(ast.unparse, node.decorator_list))
        for node in NOXFILE.body
        if isinstance(node, ast.FunctionDef) and "nox.session" in ast.unparse(node)
    }


def pythons() -> list[str]:
    """Return the releases of Python that the package supports."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))


def jobs(workflow: str) -> dict[str, Any]:
    """Return the jobs of a workflow."""
    found: dict[str, Any] = read(WORKFLOWS[workflow])["jobs"]
    return found


def commands(job: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the commands of a job for each combination of its matrix, with its values."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        combination = dict(zip(matrix, values, strict=True))
        for step in job["steps"]:
            command = step.get("run", "")
            for name, value in combination.items():
                command = command.replace(f"${{{{ matrix.{name} }}}}", value)
            yield command, combination


def run_by(workflow: str) -> list[str]:
    """Return the sessions that a workflow runs."""
    found = []
    for job in jobs(workflow).values():
        for command, _ in commands(job):
            for selected in re.findall(r"nox -s ((?:(?!-)[^\s]+ ?)+)", command):
                found += selected.split()
    return found


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_a_file_is_yaml_without_the_address_of_an_index(path: Path) -> None:
    assert isinstance(read(path), dict)
    assert "index-url" not in path.read_text("utf-8")
    if path.parent.name == "workflows":
        assert "://" not in path.read_text("utf-8")


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_runs_sessions_that_exist(workflow: str) -> None:
    known = sessions()
    assert run_by(workflow)
    for text in run_by(workflow):
        found = SESSION.fullmatch(text)
        assert found, text
        assert found[1] in known, text
        if found[1] == "peers":
            assert f"'{found[2]}'" in known["peers"]
        elif found[1] == "compatibility":
            python, torch = found[2].split("-")
            assert python in pythons()
            assert f"-{torch}'" in known["compatibility"]
        else:
            assert found[2] is None


def test_the_checks_are_those_of_the_required_program_on_each_python_in_four_parts() -> None:
    required = re.findall(r"(?m)nox -s ([\w ]+)", (ROOT / ".ci/run").read_text("utf-8"))
    assert {name for names in required for name in names.split()} | {"smoke"} == {*run_by("checks")}
    parts = {(found["python"], found["part"]) for _, found in commands(jobs("checks")["tests"])}
    assert parts == {(python, str(part)) for python in pythons() for part in range(1, 5)}
    assert jobs("checks")["smoke"]["strategy"]["matrix"] == {"system": ["macos-latest", "windows-latest"]}


def test_each_night_all_peers_and_releases_of_torch_are_tried() -> None:
    found = run_by("nightly")
    [peers] = re.findall(r"for name in \(([^)]*)\)", sessions()["peers"])
    assert {f'"peers({name})"' for name in re.findall(r"\w+", peers)} <= {*found}
    assert {f'"compatibility({python}-newest)"' for python in pythons()} <= {*found}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_may_only_read_and_ends(workflow: str) -> None:
    assert read(WORKFLOWS[workflow])["permissions"] == {"contents": "read"}
    for name, job in jobs(workflow).items():
        assert int(job["timeout-minutes"]) < 360
        assert job.get("permissions") == ({"id-token": "write"} if name == "publish" else None)
        for step in job["steps"]:
            assert re.fullmatch(r"[\w/-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] == "false"


def test_only_what_the_release_session_has_built_is_published() -> None:
    release, publish = jobs("publish")["release"], jobs("publish")["publish"]
    assert any("nox -s release" in step.get("run", "") for step in release["steps"])
    assert publish["needs"] == "release"
    assert [step for step in publish["steps"] if "run" in step] == []
    assert publish["steps"][-1]["with"] == {"attestations": "true"}


def test_the_files_of_each_part_together_are_all() -> None:
    """The option by which workflows divide the tests; `conftest.py` has it."""
    files = [Path(f"test_{number // 3}.py") for number in range(31)]
    parts = [files_of_part(files, f"{number}/4") for number in range(1, 5)]
    assert {*files} == set.union(*parts)
    assert sorted(map(len, parts)) == [2, 3, 3, 3]
    with pytest.raises(ValueError, match="K from 1 to N"):
        files_of_part(files, "5/4")
