"""Runs a script that trains on one rank of several, and records the keys in the rows of each step, as lines of JSON.

The arguments are the folder for the records, the script and its arguments.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import wds_datapipes  # noqa: F401 - the next import warns without it

from torchdata.dataloader2.dataloader2 import DataLoader2Iterator  # isort: skip

folder, take = Path(sys.argv[1]), DataLoader2Iterator.__next__
folder.mkdir(exist_ok=True)
records = open(folder / os.environ["RANK"], "w", buffering=1, encoding="utf-8")  # noqa: SIM115


def take_and_record(iterator: Any) -> Any:
    rows = take(iterator)
    records.write(json.dumps([row["__key__"] for row in rows]) + "\n")
    return rows


DataLoader2Iterator.__next__ = take_and_record
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
