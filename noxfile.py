"""The checks of this project, one session each; `nox -l` lists them, and `.ci/run` runs those that have to pass."""

from __future__ import annotations

import os
import time
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types", "doctest", "docs"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = "constraints.txt"
#: What `tests` leaves to `doctest`.
DOCUMENTATION = "tests/test_documentation.py"
#: Each process takes the next file: at first the longest, which conftest.py lists, and not those with the most tests.
IN_THEIR_ORDER = ["--dist=loadfile", "--no-loadscope-reorder"]
#: How pytest ends where the arguments choose no test.
NOTHING_CHOSEN = 5
#: What sweeps more in `nightly`: in `tests`, every value of each dimension with some of the others.
SWEEPS = [
    "tests/loading/test_checkpoint.py",
    "tests/loading/test_repaired_service.py",
    "tests/loading/test_service_laws.py",
    "tests/loading/test_training_run.py",
    "tests/fuzzing/test_targets.py",
]
#: What `minimal` runs: tests that import no extra but dataloader2, of each floor, and what depends on its release.
MINIMAL_TESTS = [
    "tests/samples/test_fields.py",
    "tests/samples/test_keys.py",
    "tests/pipes/test_stage_contract.py",
    "tests/properties/test_tar_laws.py",
    "tests/loading/test_inbox.py",
    "tests/loading/test_prefetching.py",
    "tests/loading/test_repaired_service.py",
    "tests/loading/test_repairs.py",
    "tests/loading/test_rounds.py",
    "tests/loading/test_service.py",
    "tests/loading/test_without_dataloader2.py",
    "tests/test_layers.py",
    "tests/test_optional_packages.py",
]


def group(name: str) -> list[str]:
    """The requirements of a dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, name))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, with everything that is optional installed."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    for chosen, where in (("not alone", ["--numprocesses=3", *IN_THEIR_ORDER]), ("alone", [])):
        arguments = [f"--ignore={DOCUMENTATION}", "-m", chosen, *where, *session.posargs]
        session.run("pytest", *arguments, success_codes=[0, NOTHING_CHOSEN])


@nox.session
def nightly(session: nox.Session) -> None:
    """Break off thousands of loaders at random, take states along 100,000 batches, and sweep all with all."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    seed = os.environ.get("RESUME_SEED", str(int(time.time())))
    session.log(f"RESUME_SEED={seed} draws the same again")
    session.run(
        "pytest",
        "--timeout=7200",
        "-rP",
        "tests/loading/test_checkpoint.py",
        "-k",
        "drawn_at_random or does_not_grow",
        *session.posargs,
        env={"RESUME_CUTS": os.environ.get("RESUME_CUTS", "5000"), "RESUME_BATCHES": "100000", "RESUME_SEED": seed},
    )
    session.run("pytest", "--numprocesses=3", *IN_THEIR_ORDER, *SWEEPS, *session.posargs, env={"WHOLE_SWEEPS": "1"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz what reads the files of others, a minute each; `nox -s fuzz -- --seconds 600 tar` for one, and longer."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("fuzz"))
    session.run("python", "tests/fuzzing/fuzz.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the format and the style of all code."""
    session.install(*group("lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check all types, strictly."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("types"))
    session.run("mypy", *session.posargs)


@nox.session
def doctest(session: nox.Session) -> None:
    """Run every example: in docstrings, in the README and in the documentation."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    session.run("pytest", "--numprocesses=3", "--doctest-modules", "wds_datapipes", DOCUMENTATION, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or anchor is an error."""
    # mkdocstrings reads the sources and imports nothing, so the package and torch need not be installed.
    session.install(*group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare with webdataset, torchdata and tarfile; arguments after `--` go to each benchmark, instead of --quick."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("bench"))
    for benchmark in sorted(Path("benchmarks").glob("bench_*.py")):
        session.run("python", str(benchmark), *(session.posargs or ["--quick"]))


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo as the README says, from a plain installation."""
    session.install(".[demo]", "-c", CONSTRAINTS)
    with session.chdir(session.create_tmp()):
        session.run("wds-datapipes", "demo", *session.posargs)


@nox.session
def minimal(session: nox.Session) -> None:
    """Run what needs no extra but `dataloader2`, with the torchdata that Python 3.13 gets."""
    pins = [line for line in Path(CONSTRAINTS).read_text().splitlines() if line.startswith("torch==")]
    session.install(".[dataloader2]", *pins, "torchdata==0.7.1", *group("minimal"))
    session.run("pytest", "--numprocesses=3", *IN_THEIR_ORDER, *MINIMAL_TESTS, *session.posargs)


@nox.session
@nox.parametrize("peer", [nox.param(name, id=name) for name in ("dali", "energon", "mpi", "stores", "wids")])
def peers(session: nox.Session, peer: str) -> None:
    """Let DALI, Energon or wids read by the indexes that are written here, and MPI convert; read stand-ins of stores.

    DALI takes 2 GB, and no GPU.
    """
    session.install("-c", CONSTRAINTS, "-e", ".[dataloader2,yaml]", *group(peer))
    session.run("pytest", f"tests/peers/test_{peer}.py", *session.posargs)
