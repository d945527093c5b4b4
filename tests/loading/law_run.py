"""Saves or resumes a loader in a separate process; a script for test_laws_of_state.py.

The arguments are the number of workers, and a cut or a file with a state. The script reads the shards in its working
folder, and prints the items of two epochs as JSON; given a cut, also the state at the cut.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from random import Random
from typing import Any

from wds_datapipes import ShardList, ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the import above


def drawn(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": rng.random()}


def main() -> None:
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    pipe = ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.rsample(0.9).shuffle_samples(6).map_samples_with_rng(drawn).to_tuple("__key__", "drawn").batch(3)
    with DataLoader2(pipe, reading_service=ShardReadingService(int(sys.argv[1]))) as loader:
        loader.seed(2026)
        results: dict[str, Any] = {}
        if sys.argv[2].isdigit():
            items = iter(loader)
            head = list(itertools.islice(items, int(sys.argv[2])))
            results["state"] = loader.state_dict()
        else:
            with open(sys.argv[2], "rb") as file:
                loader.load_state_dict(json.load(file))
            head, items = [], iter(loader)
        results["epochs"] = [head, list(items), list(loader)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
