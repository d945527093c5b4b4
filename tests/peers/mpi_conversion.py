"""A conversion on the processes of MPI; a script, because `mpiexec` starts it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from mpi4py.futures import MPIPoolExecutor

from wds_datapipes import JobOptions, convert_shards
from wds_datapipes.errors import ConversionError

#: The command line of processes that wait for tasks also starts with the name of the script.
FOLDER = Path(sys.argv[-1])


def convert(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Record which process works, and fail at the last shard until it is fixed."""
    key = sample["__key__"]
    (FOLDER / "pids" / str(os.getpid())).touch()
    if key == "5-3" and not (FOLDER / "cured").exists():
        raise LookupError("no such label")
    return None if key.endswith("0") else sample


def main() -> None:
    shards = [f"{FOLDER}/{number}.tar" for number in range(6)]
    told: dict[str, Any] = {"this": os.getpid()}
    with MPIPoolExecutor() as executor:
        try:
            convert_shards(convert, shards, f"{FOLDER}/out/", executor=executor, job=JobOptions(retries=1))
        except ConversionError as error:
            told["failures"] = {os.path.basename(url): repr(cause) for url, cause in error.failures.items()}
        told["first"] = sorted(path.name for path in FOLDER.glob("out/*.tar"))
        (FOLDER / "cured").touch()
        told["second"] = [
            shard.is_new for shard in convert_shards(convert, shards, f"{FOLDER}/out/", executor=executor)
        ]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
