"""Tell which changes of the code the tests notice, so that tests can be deleted with evidence.

`nox -s mutation -- coverage` runs the tests once, and records which test runs which line, also in the processes that
it starts. `nox -s mutation -- mutate --seed 1 --count 100` then changes the code in a copy of the checkout, one change
at a time, and runs the tests that reach the changed line, the fastest first, until one fails. Results are kept after
each mutant: the same command continues after an interruption, and a larger count adds mutants to those of a smaller.
Of the tests that reach a line, only the fastest run that take `--seconds` in all. `--without tests/io` tells which
mutants survive without these tests.

A process that a signal kills records nothing, so its lines count only where another process or test runs them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from coverage import Coverage
from mutants import Mutant, mutants_of
from mutation_plugin import CURRENT_TESTS
from pytest_runs import ROOT, TEST_SECONDS, copy_of_checkout, mutated, run_pytest, run_selected
from recording import DATA, PACKAGE, TABLES, Recorded, Result, digest, digests, is_below

#: Warnings are errors in the tests, and processes that run no line of the package are none.
CONFIGURATION = """
[run]
parallel = true
core = ctrace
data_file = {folder}/coverage
include = {include}
plugins = mutation_plugin
patch = subprocess, fork, _exit
disable_warnings =
    no-data-collected, module-not-imported, module-not-measured, already-imported, include-ignored, trace-changed
"""
#: How many tests run first, since one of them notices most mutants, and others take long to collect.
FIRST = 10
TESTS_FAILED, NO_TESTS_SELECTED = 1, 5


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("coverage", help="record which test runs which line")
    command.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests")
    command.add_argument("--numprocesses", type=int, default=3)
    command.set_defaults(run=record)
    command = commands.add_parser("mutate", help="draw mutants, and count those that the tests notice")
    command.add_argument("folders", nargs="*", default=[PACKAGE], help="files or folders of the package")
    command.add_argument("--seed", type=int, required=True)
    command.add_argument("--count", type=int, required=True)
    command.add_argument("--seconds", type=float, default=300, help="run the fastest tests of a mutant, for so long")
    command.add_argument("--without", nargs="+", default=[], help="files, folders or names of tests to leave out")
    command.add_argument("--json", type=Path, help="the file for the results")
    command.set_defaults(run=mutate)
    options = parser.parse_args()
    try:
        options.run(options)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command of `mutate` continues with the next mutant")


def record(options: argparse.Namespace) -> None:
    """Run the tests, and record which of them run each line, in all processes, how long they take, and which fail."""
    with TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        (folder / "current").mkdir()
        configuration = folder / "coveragerc"
        configuration.write_text(CONFIGURATION.format(folder=folder, include=f"{ROOT}/{PACKAGE}/*"))
        environment = {CURRENT_TESTS: str(folder / "current")}
        tests = [*options.tests, "--ignore=tests/test_documentation.py"]
        ended = {}
        for number, marker in enumerate(("not alone", "alone")):
            spread = ["-n", str(options.numprocesses), "--dist=loadfile"] if not number and options.numprocesses else []
            command = ["coverage", "run", f"--rcfile={configuration}", "-m", "pytest"]
            ran = run_pytest(ROOT, [*tests, "-m", marker, *spread], folder, environment, command)
            if ran.status not in (0, TESTS_FAILED, NO_TESTS_SELECTED) or (ran.status == TESTS_FAILED and not ran.tests):
                sys.exit(f"pytest ended with status {ran.status}:\n{ran.output}")
            ended.update(ran.tests)
        failed = {name: TEST_SECONDS + 10 * test.seconds for name, test in ended.items() if test.failed}
        if failed:  # some may fail only because of coverage
            ended.update(run_selected(ROOT, failed, folder, stop=False).tests)
        coverage = Coverage(config_file=str(configuration))
        coverage.combine([str(folder)])
        coverage.save()
        with contextlib.closing(sqlite3.connect(folder / "coverage")) as data, data:
            data.executescript(TABLES)
            data.executemany("INSERT INTO test VALUES (?, ?, ?)", ((name, *test) for name, test in ended.items()))
            data.executemany("INSERT INTO source VALUES (?, ?)", digests().items())
        DATA.parent.mkdir(exist_ok=True)
        shutil.move(folder / "coverage", DATA)
    print(f"recorded {len(ended)} tests in {DATA}")
    for name, test in sorted(ended.items()):
        if test.failed:
            print(f"fails without any mutant, and is left out: {name}")


def mutate(options: argparse.Namespace) -> None:
    """Draw mutants, run the tests that reach them, and report which survived."""
    if not DATA.exists():
        sys.exit(f"{DATA} does not exist: run `nox -s mutation -- coverage` first")
    with contextlib.closing(sqlite3.connect(DATA)) as data:
        recorded = Recorded(data)
        for names, known in ((options.folders, recorded.lines), (options.without, recorded.seconds)):
            for name in names:
                if not any(is_below(each, [name]) for each in known):
                    sys.exit(f"no recorded module or test is in {name}: it has moved, or `coverage` left it out")
        chosen = [path for path in recorded.lines if is_below(path, options.folders)]
        mutants = [mutant for path in sorted(chosen) for mutant in mutants_of(path, (ROOT / path).read_text("utf-8"))]
        covered = [mutant for mutant in mutants if recorded.is_covered(mutant)]
        # By digests, so that the same are drawn when others are no longer covered.
        drawn = sorted(covered, key=lambda mutant: digest(f"{options.seed} {mutant}".encode()))[: options.count]
        results = {}
        with copy_of_checkout() as copy:
            for number, mutant in enumerate(drawn, 1):
                result = recorded.result(mutant, options)
                if result is None:
                    result = judge(copy, mutant, recorded, options)
                    recorded.keep(mutant, options, result)
                results[mutant] = result
                print(f"{number}/{len(drawn)} {describe(mutant, results[mutant])}", flush=True)
        report(options, results, mutants, covered)


def judge(copy: Path, mutant: Mutant, recorded: Recorded, options: argparse.Namespace) -> Result:
    """Run the tests that reach a mutant until one fails that passes without it, and fails again with it."""
    reaching = recorded.tests(mutant, options.without)
    total = accumulate(recorded.seconds[test] for test in reaching)
    tests = [test for test, seconds in zip(reaching, total, strict=True) if seconds <= options.seconds] or reaching[:1]
    count = 0
    while tests:
        batch, tests = (tests[:FIRST], tests[FIRST:]) if not count else (tests, [])
        batch = grouped_by_file(batch)
        with mutated(copy, mutant):
            ran = run_selected(copy, recorded.time_outs(batch), copy.parent)
        count += len(ran.tests)
        if ran.status == 0:
            continue
        # The test that failed, or during which the process ended or took too long.
        killer = next((test for test in batch if test not in ran.tests or ran.tests[test].failed), batch[0])
        alone = recorded.time_outs([killer])
        if killer in recorded.passing or run_selected(copy, alone, copy.parent).status == 0:
            recorded.passing.add(killer)
            with mutated(copy, mutant):
                again = run_selected(copy, alone, copy.parent)
            if again.status != 0:
                return Result(killer, count, len(reaching))
            print(f"fails only sometimes, which is no evidence: {killer}", flush=True)
        else:
            recorded.leave_out(killer)
        tests = [test for test in batch if test != killer and test not in ran.tests] + tests
    return Result(None, count, len(reaching))


def grouped_by_file(tests: list[str]) -> list[str]:
    """Return the tests of each file together, since the fixtures of a module may be set up only once."""
    files = [name.partition("::")[0] for name in tests]
    return sorted(tests, key=lambda name: files.index(name.partition("::")[0]))


def describe(mutant: Mutant, result: Result) -> str:
    """Return the mutant and the test that noticed it, or the number of those that did not."""
    outcome = f"killed by {result.killer}" if result.killer else f"survived {result.ran} of {result.tests} tests"
    return f"{mutant}: {outcome}"


def report(
    options: argparse.Namespace, results: dict[Mutant, Result], mutants: list[Mutant], covered: list[Mutant]
) -> None:
    """Print the scores and the survivors, and write them to the file if there is one."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)

    def count(what: str, counted: Iterable[Mutant]) -> None:
        for mutant in counted:
            for folder in ("/".join(mutant.path.split("/")[:2]), "all"):
                folders[folder][what] += 1

    count("mutants", mutants)
    count("covered", covered)
    count("drawn", results)
    count("killed", (mutant for mutant, result in results.items() if result.killer))
    print(f"\n{'':26}{'possible':>9}{'uncovered':>10}{'drawn':>7}{'killed':>7}  score")
    for folder, counts in sorted(folders.items(), key=lambda item: (item[0] == "all", item[0])):
        score = f"{counts['killed'] / counts['drawn']:.1%}" if counts["drawn"] else ""
        uncovered = counts["mutants"] - counts["covered"]
        print(f"{folder:26}{counts['mutants']:9,}{uncovered:10,}{counts['drawn']:7,}{counts['killed']:7,}  {score:>5}")
    survivors = [describe(mutant, result) for mutant, result in sorted(results.items()) if not result.killer]
    print(f"\n{len(survivors)} survivors:", *survivors, sep="\n")
    if options.json is not None:
        described = [
            {**mutant._asdict(), **result._asdict(), "survived": result.killer is None}
            for mutant, result in results.items()
        ]
        summary = {"seed": options.seed, "without": options.without, "folders": folders, "mutants": described}
        options.json.write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
