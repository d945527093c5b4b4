"""Each row of `contract.md` has one test, which runs webdataset along with this package."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
#: The tests of rows that need wids, among others.
BESIDE_WIDS = FOLDER.parent / "peers/test_wids.py"
#: Number, behaviour of webdataset, and what this package does instead, if it differs.
TABLE = re.findall(r"(?m)^\| (\w+) \| (.+) \| (.*) ?\|$", (FOLDER / "contract.md").read_text(encoding="utf-8"))
NUMBERS = [*map(str, range(1, 81)), *"abcdefghijklmnop"]


def contract_tests() -> list[tuple[str, ast.FunctionDef]]:
    """Return the tests that carry the number of a row, by number."""
    found = []
    for path in [*sorted(Path(__file__).parent.glob("test_*.py")), BESIDE_WIDS]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and (
                match := re.match(r"test_(?:(\d\d)|measured_([a-p]))_", node.name)
            ):
                found.append(((match[1] or match[2]).lstrip("0"), node))
            elif path not in (Path(__file__), BESIDE_WIDS) and isinstance(node, ast.FunctionDef):
                assert not node.name.startswith("test_"), f"{node.name} has no number of a row"
    return found


def test_every_row_has_one_test() -> None:
    assert [number for number, _, _ in TABLE[1:]] == NUMBERS
    assert Counter(number for number, _ in contract_tests()) == Counter(NUMBERS)


def test_every_test_also_runs_webdataset() -> None:
    for number, node in contract_tests():
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        assert names & {"theirs", "their_pipe", "webdataset"}, f"row {number}: {node.name} runs this package alone"
