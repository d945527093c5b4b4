"""The checks of this project, one session each; `nox -l` lists them, and `.ci/run` runs the required ones."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types", "doctest", "docs"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PROJECT = nox.project.load_toml("pyproject.toml")
VERSION = PROJECT["project"]["version"]
CONSTRAINTS = "constraints.txt"
#: The tests that run in the `doctest` session instead of `tests`.
DOCUMENTATION = "tests/test_documentation.py"
#: Distribute whole files in collection order, the slowest first; by default, xdist starts with those with most tests.
FILES_IN_ORDER = ["--dist=loadfile", "--no-loadscope-reorder"]
#: The files of tests that run alone: collecting the others takes as long as these tests.
ALONE = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.alone" in path.read_text("utf-8")]
#: The environment of the tests, which start hundreds of programs: each would compile the package again.
COMPILED_ONCE = {"PYTHONDONTWRITEBYTECODE": None}
#: The exit codes of pytest if tests failed, and if the arguments select no test.
TESTS_FAILED, NO_TESTS_SELECTED = 1, 5
#: The tests of `quick`, which take under a minute: no worker processes, no servers, no commands.
QUICK_TESTS = [
    *(f"tests/{name}" for name in ("codecs", "index", "on_error", "samples", "tar", "writing")),
    "tests/test_layers.py",
    "tests/test_public_api.py",
]
#: The tests of `minimal`: those that import no extra, from each layer, and those that depend on its
#: release.
MINIMAL_TESTS = [
    "tests/samples/test_fields.py",
    "tests/samples/test_keys.py",
    "tests/pipes/test_stage_contract.py",
    "tests/properties/test_tar_laws.py",
    "tests/loading/test_prefetching.py",
    "tests/loading/test_patches.py",
    "tests/loading/service/test_service.py",
    "tests/loading/test_without_dataloader2.py",
    "tests/test_layers.py",
    "tests/test_optional_packages.py",
]
#: The command that compares the size of the code with the limits in pyproject.toml.
CODE_SIZE = ["python", "tests/checks/code_size.py", json.dumps(PROJECT["tool"]["wds-datapipes"]["size"])]
#: The Pythons of pyproject.toml, the oldest release of torch that it permits, and the Pythons that this has wheels for.
PYTHONS = nox.project.python_versions(PROJECT)
OLDEST_TORCH, PYTHONS_OF_OLDEST = "2.4.1", ("3.10", "3.11", "3.12")
#: The questions of benchmarks that the documentation answers, and their arguments, by program.
REPORTED = {
    "peers": ["end_to_end", "s3", "--workers", "2", "--stores", "10 ms", "100 ms"],
    "reading": ["reading", "--sets", "SMALL", "IMG", "BIG"],
    "index": ["indexed", "--sets", "SMALL", "IMG", "BIG"],
    "remote": ["remote", "parts"],
    "decode": ["decoding"],
    "transport": ["delivery"],
    "packing": ["packing", "planning"],
    "write": ["writing"],
    "state": ["state", "runs"],
    "scale": ["growth"],
    "batches": ["shuffle_quality"],
    "train": ["training", "--width", "8"],
    "other_hosts": ["other_hosts"],
    "own_code": ["own_code"],
}


def group(name: str) -> list[str]:
    """The requirements of a dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, name))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, with all optional dependencies installed."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    failed = []
    others = session.posargs or ALONE
    for marker, selected in (("not alone", ["--numprocesses=4", *FILES_IN_ORDER, *session.posargs]), ("alone", others)):
        arguments = [f"--ignore={DOCUMENTATION}", "-m", marker, *selected]
        try:
            session.run("pytest", *arguments, success_codes=[0, NO_TESTS_SELECTED], env=COMPILED_ONCE)
        except nox.command.CommandFailed:
            failed.append(marker)
    if failed:
        session.error(f"tests failed among those marked: {', '.join(failed)}")


@nox.session
def stress(session: nox.Session) -> None:
    """Run the tests 20 times while all cores are busy, and count what failed; not those that must run alone.

    `nox -s stress -- --times 5 tests/tools/cli` runs some of them 5 times.
    """
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    parser = argparse.ArgumentParser(prog="nox -s stress --")
    parser.add_argument("--times", type=int, default=20)
    options, selected = parser.parse_known_args(session.posargs)
    failures: Counter[str] = Counter()
    arguments = [f"--ignore={DOCUMENTATION}", "-m", "not alone", "--numprocesses=3", *FILES_IN_ORDER, *selected]
    with busy_cores():
        for number in range(options.times):
            log = session.run("pytest", *arguments, silent=True, success_codes=[0, TESTS_FAILED])
            lines = str(log).splitlines()
            failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
            if failed:
                session.log(str(log))
            session.log(f"run {number + 1} of {options.times}: {lines[-1]}")
            failures.update(failed)
    for name, count in failures.most_common():
        session.log(f"failed {count} of {options.times} times: {name}")
    if failures:
        session.error(f"{len(failures)} tests failed at least once")


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@nox.session
def quick(session: nox.Session) -> None:
    """Run the tests of reading, samples and writing in under a minute, for use while editing."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    session.run("pytest", "--numprocesses=3", *QUICK_TESTS, *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Save states over 100,000 batches, test all combinations, and generate random pipelines for an hour.

    Also draws new examples for all properties. `RANDOM_PIPELINES_SEED` reproduces a run.
    """
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    pipelines_seed = os.environ.get("RANDOM_PIPELINES_SEED", str(int(time.time())))
    session.log(f"RANDOM_PIPELINES_SEED={pipelines_seed} reproduces this run")
    session.run(
        "pytest",
        "--timeout=7200",
        "-rP",
        "tests/loading/checkpoint/test_own_pipeline.py",
        "-k",
        "process_does_not_grow",
        *session.posargs,
        env={"RESUME_BATCHES": "100000"},
    )
    session.run(
        "pytest",
        "--timeout=7200",
        "tests/properties/test_random_pipelines.py",
        env={"RANDOM_PIPELINES_SECONDS": "3600", "RANDOM_PIPELINES_SEED": pipelines_seed},
    )
    arguments = [f"--ignore={DOCUMENTATION}", *FILES_IN_ORDER, *session.posargs]
    for selected in (["-m", "not alone", "--numprocesses=3"], ["-m", "alone"]):
        session.run("pytest", *selected, *arguments, env={"WHOLE_SWEEPS": "1"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz the parsers of untrusted files for a minute each; `nox -s fuzz -- --seconds 600 tar` runs one for longer."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("fuzz"))
    session.run("python", "tests/fuzzing/fuzz.py", *session.posargs)


@nox.session
def mutation(session: nox.Session) -> None:
    """Tell which changes of the code the tests notice: `-- coverage`, and then `-- mutate --seed 1 --count 100`."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("mutation"))
    session.run("python", "tests/checks/mutation/mutation.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the format, the style and the size of all code."""
    session.install(*group("lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run(*CODE_SIZE, "--check")


@nox.session
def size(session: nox.Session) -> None:
    """Print the lines of code in each folder, and what exceeds the limits in pyproject.toml."""
    session.run(*CODE_SIZE)


@nox.session
def types(session: nox.Session) -> None:
    """Check all types, strictly."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("types"))
    session.run("mypy", *session.posargs)


@nox.session
def doctest(session: nox.Session) -> None:
    """Run every example in docstrings, the README and the documentation."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("tests"))
    session.run("pytest", "--numprocesses=3", "--doctest-modules", "wds_datapipes", DOCUMENTATION, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, and run its notebook; a broken link or anchor is an error, and so is a failed cell."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("docs"))
    session.run(
        "sphinx-build", "--fail-on-warning", "--keep-going", "--fresh-env", "--quiet", "docs", "site", *session.posargs
    )


@nox.session
def release(session: nox.Session) -> None:
    """Do all of a release but the upload: build the sdist and the wheel in `dist`, check them, and use the wheel.

    `compatibility` uses it, on each Python with the newest torch. An interpreter that is missing is reported. With `--
    --tag v0.1.0`, that is the tag; the workflow that publishes passes it, and signs attestations with the upload.
    """
    session.install(*group("release"))
    check_version(session)
    if session.posargs and session.posargs != ["--tag", f"v{VERSION}"]:
        session.error(f"the tag is to be v{VERSION}, and the arguments are {session.posargs}")
    sdist, wheel = Path(f"dist/wds_datapipes-{VERSION}.tar.gz"), Path(f"dist/wds_datapipes-{VERSION}-py3-none-any.whl")
    session.run("python", "-m", "build", "--outdir", str(wheel.parent))
    session.run("twine", "check", "--strict", str(sdist), str(wheel))
    session.run("check-wheel-contents", str(wheel))
    check_contents(session, sdist, wheel)
    for python in PYTHONS:
        session.notify(f"compatibility({python}-newest)", [str(wheel)])


def check_version(session: nox.Session) -> None:
    """Compare the version and the date of a release in the files that have them."""
    cited = dict(re.findall(r"(?m)^(version|date-released): (.+)$", Path("CITATION.cff").read_text("utf-8")))
    newest = re.findall(r"(?m)^## (.+)$", Path("CHANGELOG.md").read_text("utf-8"))[0]
    date.fromisoformat(cited["date-released"])
    wanted = f"{cited['version']} - {cited['date-released']}"
    if (cited["version"], newest) != (VERSION, wanted):
        session.error(
            f"pyproject.toml has version {VERSION}, CITATION.cff has {wanted}, and the first section of CHANGELOG.md "
            f"is {newest!r}: they must be the same"
        )


def check_contents(session: nox.Session, sdist: Path, wheel: Path) -> None:
    """Compare the files of the distributions with those that git tracks, and check what a package index shows."""
    tracked = {*str(session.run("git", "ls-files", external=True, silent=True)).splitlines()}
    info = f"wds_datapipes-{VERSION}.dist-info/"
    extra = {info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    with tarfile.open(sdist) as files, ZipFile(wheel) as archive:
        contents = {
            sdist: ({name.partition("/")[2] for name in files.getnames()}, {*tracked, "PKG-INFO"}),
            wheel: ({*archive.namelist()}, {name for name in tracked if name.startswith("wds_datapipes/")} | extra),
        }
        page = archive.read(f"{info}METADATA").decode()
    for file, (found, wanted) in contents.items():
        if found != wanted:
            session.error(f"{file} lacks {sorted(wanted - found)}, and contains {sorted(found - wanted)} beyond them")
    if untrue := [text for text in ("on PyPI yet", "checkout", '".[') if text in page]:
        session.error(f"the page on PyPI would contain {untrue}: see the substitutions in pyproject.toml")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks, and write their results to the documentation; `-- --quick` checks that all of them work.

    The environments of other loaders take 8 GB. One that cannot be installed is left out, and the output says so.
    """
    session.install("-c", CONSTRAINTS, "-e", ".[all,ray]", *group("bench"))
    for name in PROJECT["dependency-groups"]:
        if name.startswith("bench_"):
            session.run_install("python", "benchmarks/environments.py", name.removeprefix("bench_"), *group(name))
    if "--quick" not in session.posargs:
        for name, arguments in REPORTED.items():
            options = ["--results", "benchmarks/results", "--only", *arguments, *session.posargs]
            session.run("python", f"benchmarks/bench_{name}.py", *options)
        session.run("python", "benchmarks/report.py", *map(str, sorted(Path("benchmarks/results").glob("*.json"))))
        return
    with TemporaryDirectory() as temporary:
        for program in sorted(Path("benchmarks").glob("bench_*.py")):
            session.run("python", str(program), "--results", temporary, *session.posargs)
        page, results = shutil.copy("docs/explanation/benchmarks.md", temporary), Path(temporary).glob("*.json")
        session.run("python", "benchmarks/report.py", "--page", page, "--images", temporary, *map(str, results))


@nox.session
def scale(session: nox.Session) -> None:
    """Print what a run on 64 hosts costs each of them: before there were lanes, now, and the goals."""
    session.install("-c", CONSTRAINTS, "-e", ".[all]", *group("bench"))
    for name, question in (("scale", "hosts"), ("state", "merged_state")):
        session.run("python", f"benchmarks/bench_{name}.py", "--only", question, *session.posargs)


@nox.session
def minimal(session: nox.Session) -> None:
    """Run the tests that need no extra, with the torchdata release that Python 3.13 gets."""
    pins = [line for line in Path(CONSTRAINTS).read_text().splitlines() if line.startswith("torch==")]
    session.install(".", *pins, "torchdata==0.7.1", *group("minimal"))
    session.run("pytest", "--numprocesses=3", *FILES_IN_ORDER, *MINIMAL_TESTS, *session.posargs)


@nox.session
def smoke(session: nox.Session) -> None:
    """Use the package on this system, as workflows do on macOS and Windows, where the tests do not run."""
    pins = [line for line in Path(CONSTRAINTS).read_text().splitlines() if line.startswith("torch==")]
    session.install(".", *pins)
    session.run("python", "tests/checks/smoke.py")


@nox.session(reuse_venv=False)
@nox.parametrize(
    "python,torch",
    [
        *(nox.param(python, OLDEST_TORCH, id=f"{python}-oldest") for python in PYTHONS_OF_OLDEST),
        *(nox.param(python, "", id=f"{python}-newest") for python in PYTHONS),
    ],
)
def compatibility(session: nox.Session, torch: str) -> None:
    """Use the package with the oldest and the newest torch, on the Pythons that each has wheels for.

    First without extras, then as the README does, and last for the tests of `minimal`. `nox -s
    "compatibility(3.10-oldest)"` runs one, and `-- dist/NAME.whl` installs a wheel instead of the checkout. An
    interpreter that is missing is reported and skipped.
    """
    package = str(Path(*session.posargs).absolute())
    pins = [f"torch=={torch}", "numpy<2"] if torch else ["torch"]
    program = str(Path("tests/checks/installation.py").absolute())
    session.install(package, *pins)
    with TemporaryDirectory() as temporary, session.chdir(temporary):
        session.run("python", program, VERSION)
        session.install(*(name for name in group("types") if name.startswith("mypy")))
        # torchdata has no types, nor has backward(), and torch 2.4 does not mark its optimizers as exported.
        lenient = ["--disable-error-code=import-untyped", "--untyped-calls-exclude=torch", "--implicit-reexport"]
        session.run("mypy", "--strict", *lenient, program, "readme.py")
        session.install(f"{package}[demo]", *pins)
        session.run("wds-datapipes", "demo")
    session.install(f"{package}[demo]", *pins, "torchdata==0.7.1", *group("minimal"))
    readme = f"{DOCUMENTATION}::test_a_page_runs[README.md]"
    session.run("pytest", "--numprocesses=3", *FILES_IN_ORDER, *MINIMAL_TESTS, readme)


@nox.session
@nox.parametrize(
    "peer",
    [
        nox.param(name, id=name)
        for name in ("dali", "hugging_face", "mpi", "nodes", "ray", "stores", "trainers", "wids")
    ],
)
def peers(session: nox.Session, peer: str) -> None:
    """Let DALI and wids read our indexes, train with trainers, load with nodes or on hosts of Ray, and emulate stores.

    DALI takes 2 GB, and needs no GPU.
    """
    if peer == "nodes":  # for a torchdata without DataLoader2
        pins = [line for line in Path(CONSTRAINTS).read_text().splitlines() if line.startswith("torch==")]
        session.install("-e", ".", *pins)
        session.install(*pins, *group(peer))  # replaces the torchdata that is installed with this package
        session.run("pytest", "--doctest-modules", "wds_datapipes/integrations/nodes.py", "tests/earlier_releases")
    else:
        extras = "ray,cbor,msgpack,zst" if peer == "ray" else "yaml,cli"
        session.install("-c", CONSTRAINTS, "-e", f".[{extras}]", *group(peer))
    if peer == "dali":
        session.run("pytest", "--doctest-modules", "wds_datapipes/integrations/dali.py")
    tests = sorted(Path("tests/peers").glob(f"test_{peer}*.py"))
    if peer == "ray":
        tests.append(Path("tests/loading/other_hosts"))
    session.run("pytest", *map(str, tests), *session.posargs)
