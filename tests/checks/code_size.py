"""Count the lines of code in each folder, and check the limits in `[tool.wds-datapipes.size]` of pyproject.toml.

Blank lines, comments and docstrings do not count. `nox -s size` prints the table, and `nox -s lint` checks the limits:
how much code each tree has, how many modules a folder has, and that no two classes of the package share a name. An
exception that is no longer needed is an error, too.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The tree in which class names are unique.
PACKAGE = "wds_datapipes"
#: The kinds of tokens that are no code.
LAYOUT = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT), tokenize.ENDMARKER}


def main() -> None:
    """Print the size of all folders, or what exceeds the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("limits", type=json.loads, help="the table of limits, as JSON")
    parser.add_argument("--check", action="store_true", help="print only what exceeds the limits, and fail if any does")
    options = parser.parse_args()
    found = list(problems(options.limits))
    if not options.check:
        print_sizes(options.limits["lines"])
    for problem in found:
        print(problem)
    sys.exit(bool(options.check and found))


def print_sizes(limits: dict[str, int]) -> None:
    """Print the modules and lines of code of each folder, and of each tree beside its limit."""
    for tree, limit in limits.items():
        modules, lines = folder_sizes(tree)
        for folder in sorted(modules):
            print(f"{folder:50} {modules[folder]:4} {lines[folder]:7,}")
        print(f"{tree + ', all':50} {modules.total():4} {lines.total():7,} of {limit:,}\n")


def problems(limits: dict[str, Any]) -> Iterator[str]:
    """Yield a message for everything that exceeds the limits."""
    crowded = set()
    for tree, limit in limits["lines"].items():
        modules, lines = folder_sizes(tree)
        if lines.total() > limit:
            yield f"{tree} has {lines.total():,} lines of code, more than the {limit:,} that pyproject.toml permits"
        crowded |= {folder for folder, count in modules.items() if count > limits["modules"]}
    repeated = {name for name, places in classes(PACKAGE).items() if len(places) > 1}
    yield from differences(f"a folder with more than {limits['modules']} modules", crowded, limits["crowded_folders"])
    yield from differences("the name of several classes", repeated, limits["repeated_classes"])


def differences(what: str, found: set[str], permitted: list[str]) -> Iterator[str]:
    """Yield a message for each name found that is not permitted, and for each permitted that was not found."""
    yield from (f"{name} is {what}" for name in sorted(found - set(permitted)))
    yield from (f"{name} is no longer {what}: remove it from pyproject.toml" for name in sorted(set(permitted) - found))


def folder_sizes(tree: str) -> tuple[Counter[str], Counter[str]]:
    """Return the number of modules and of lines of code of each folder of a tree, or of a tree that is a module."""
    modules: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    start = ROOT / tree
    for path in [start] if start.is_file() else start.rglob("*.py"):
        folder = path.parent.relative_to(ROOT).as_posix()
        modules[folder] += 1
        lines[folder] += count_lines(path.read_text(encoding="utf-8"))
    return modules, lines


def count_lines(source: str) -> int:
    """Return the number of lines of code, without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
                    docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def classes(tree: str) -> dict[str, list[str]]:
    """Return the modules that define a class of each name."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / tree).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    return places


if __name__ == "__main__":
    main()
