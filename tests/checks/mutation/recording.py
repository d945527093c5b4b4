"""What is recorded: which test runs which line, and the results of mutants, in one file."""

from __future__ import annotations

import argparse
import hashlib
import json
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from coverage.numbits import num_in_numbits, numbits_to_nums
from mutants import Mutant
from pytest_runs import ROOT, TEST_SECONDS

#: The folder whose lines are recorded and changed.
PACKAGE = "wds_datapipes"
#: What is recorded: the data file of coverage, with tables of our own.
DATA = ROOT / ".cache" / "mutation.sqlite"
TABLES = """
CREATE TABLE test (name TEXT PRIMARY KEY, seconds REAL, failed INTEGER);
CREATE TABLE source (path TEXT PRIMARY KEY, digest TEXT);
CREATE TABLE result (
    mutant TEXT, without TEXT, seconds REAL, killer TEXT, ran INTEGER, tests INTEGER,
    PRIMARY KEY (mutant, without, seconds)
);
"""


class Result(NamedTuple):
    """The test that notices a mutant, or none, how many tests ran, and how many reach it."""

    killer: str | None
    ran: int
    tests: int


class Recorded:
    """The lines that each test runs, and the results so far."""

    def __init__(self, data: sqlite3.Connection) -> None:
        self.data = data
        if dict(data.execute("SELECT path, digest FROM source")) != digests():
            sys.exit("the package or its tests changed: run `nox -s mutation -- coverage` again")
        self.seconds: dict[str, float] = dict(data.execute("SELECT name, seconds FROM test WHERE NOT failed"))
        #: The tests that passed alone in the copy without any mutant.
        self.passing: set[str] = set()
        #: For each file, the tests that run its lines, and the numbers of these lines as bits.
        self.lines: dict[str, list[tuple[str, bytes]]] = {path: [] for path in digests() if is_below(path, [PACKAGE])}
        joined = "line_bits JOIN file ON file_id = file.id JOIN context ON context_id = context.id"
        for path, test, bits in data.execute(f"SELECT path, context, numbits FROM {joined}"):
            if test in self.seconds:
                self.lines[Path(path).relative_to(ROOT).as_posix()].append((test, bits))
        self.covered = {
            path: {line for _, bits in tests for line in numbits_to_nums(bits)} for path, tests in self.lines.items()
        }

    def line(self, mutant: Mutant) -> int:
        """Return the line whose tests run the mutant: that of the statement if its own has no bytecode."""
        return mutant.line if mutant.line in self.covered[mutant.path] else mutant.statement_line

    def is_covered(self, mutant: Mutant) -> bool:
        """Return whether any test runs the mutant."""
        return self.line(mutant) in self.covered[mutant.path]

    def tests(self, mutant: Mutant, without: list[str]) -> list[str]:
        """Return the tests that run the mutant, the fastest first."""
        line = self.line(mutant)
        names = {name for name, bits in self.lines[mutant.path] if num_in_numbits(line, bits)}
        return sorted((name for name in names if not is_below(name, without)), key=lambda name: self.seconds[name])

    def time_outs(self, tests: Iterable[str]) -> dict[str, float]:
        """Return the seconds that each test may take."""
        return {test: TEST_SECONDS + 10 * self.seconds[test] for test in tests}

    def result(self, mutant: Mutant, options: argparse.Namespace) -> Result | None:
        """Return the earlier result of a mutant that holds for these options, too."""
        query = "SELECT without, seconds, killer, ran, tests FROM result WHERE mutant = ?"
        for without, seconds, *result in self.data.execute(query, [str(mutant)]):
            found = Result(*result)
            if found.killer is not None:
                holds = not is_below(found.killer, options.without)
            else:
                holds = set(json.loads(without)) <= set(options.without) and seconds >= options.seconds
            if holds:
                return found
        return None

    def keep(self, mutant: Mutant, options: argparse.Namespace, result: Result) -> None:
        """Store the result of a mutant."""
        row = [str(mutant), json.dumps(sorted(options.without)), options.seconds, *result]
        with self.data:
            self.data.execute("INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?, ?, ?)", row)

    def leave_out(self, test: str) -> None:
        """Leave out a test that fails without any mutant."""
        print(f"fails without any mutant, and is left out: {test}", flush=True)
        del self.seconds[test]
        self.lines = {path: [row for row in rows if row[0] != test] for path, rows in self.lines.items()}
        with self.data:
            self.data.execute("UPDATE test SET failed = 1 WHERE name = ?", [test])


def digests() -> dict[str, str]:
    """Return the digest of each module of the package and of the tests."""
    paths = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "conftest.py"]
    return {path.relative_to(ROOT).as_posix(): digest(path.read_bytes()) for path in paths}


def digest(data: bytes) -> str:
    """Return the SHA-256 digest of data."""
    return hashlib.sha256(data).hexdigest()


def is_below(name: str, prefixes: list[str]) -> bool:
    """Return whether a file or test is one of these, or in one of these files or folders."""
    return any(name == prefix or name.startswith((f"{prefix}/", f"{prefix}::", f"{prefix}[")) for prefix in prefixes)
