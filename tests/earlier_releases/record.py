"""Store what this release writes, for the tests of the next one.

    PYTHONPATH=.:tests/support:tests/pages:tests/properties python tests/earlier_releases/record.py

writes `tests/earlier_releases/0.1` if this is a release 0.1: shards, their indexes and a manifest, states of loaders,
and the samples that follow them. Run it in two environments, one with torchdata 0.9 and one with torchdata 0.10 or
later, whose loaders it adds. What is stored stays as it is: to record a release again that is not published yet,
remove its folder first.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

from stored_runs import FOLDER, LOADERS, cases, defaults, facts_of_indexes, release, saved, title, write_dataset


def main() -> None:
    """Store what is missing."""
    warnings.simplefilter("ignore")
    folder = FOLDER / release()
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if is_new:
        write_dataset()
        write("indexes.json", facts_of_indexes())
        write("defaults.json", defaults())
        write("states.json", {})
    with open("states.json", encoding="utf-8") as file:
        states = json.load(file)
    for case in cases():
        if case[0] in LOADERS and title(*case) not in states:
            states[title(*case)] = saved(*case)
    write("states.json", {title(*case): states[title(*case)] for case in cases() if title(*case) in states})
    print(f"{folder} has {len(states)} states of {len([*cases()])}")


def write(name: str, value: dict[str, Any]) -> None:
    """Write a file of the release, with a line for each of its entries."""
    lines = [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
    with open(name, "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
