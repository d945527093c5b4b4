"""A conversion on a Dask cluster of two processes, one of which is killed; a script, which the cluster can import."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import dask
from distributed import Client, LocalCluster

from wds_datapipes import convert_shards
from wds_datapipes.errors import ConversionError

FOLDER = Path(sys.argv[1])


def convert(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Be killed once in the middle of the second shard, and fail for each attempt at the last."""
    key = sample["__key__"]
    if key == "1-3" and not (FOLDER / "killed").exists():
        (FOLDER / "killed").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    if key == "5-3" and not (FOLDER / "cured").exists():
        with (FOLDER / "tried").open("a") as file:
            file.write(f"{os.getpid()}\n")
        raise LookupError("no such label")
    return None if key.endswith("0") else sample


def main() -> None:
    shards = [f"{FOLDER}/{number}.tar" for number in range(6)]
    told: dict[str, Any] = {}
    # A task whose worker is lost returns at once as failed; Dask itself would retry three times.
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        executor = client.get_executor()
        try:
            convert_shards(convert, shards, f"{FOLDER}/out/", executor=executor, retries=2)
        except ConversionError as error:
            told["failures"] = {os.path.basename(url): repr(cause) for url, cause in error.failures.items()}
        told["first"] = sorted(path.name for path in FOLDER.glob("out/*.tar"))
        (FOLDER / "cured").touch()
        told["second"] = [
            shard.is_new for shard in convert_shards(convert, shards, f"{FOLDER}/out/", executor=executor)
        ]
        told["this"] = os.getpid()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
