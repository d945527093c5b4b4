"""Prints the items of a seeded run as JSON; a script, because the tests run it in other interpreters."""

import gc
import json
import random
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes import ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the import above
from torchdata.datapipes.iter import IterableWrapper  # isort: skip

WORDS = [f"word {number}" for number in range(30)]


def draw(item: Any) -> list[Any]:
    """Add a number from each of the global generators."""
    return [item, random.random(), float(np.random.random()), float(torch.rand(()))]


if __name__ == "__main__":
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    words = IterableWrapper(WORDS).shuffle()
    dispatched = words.map(draw).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    split = IterableWrapper(range(30)).shuffle().sharding_filter().map(draw)
    pipe = dispatched.zip(split).shuffle(buffer_size=4)
    with DataLoader2(pipe, reading_service=ShardReadingService(2, sys.argv[1])) as loader:
        loader.seed(5)
        print(json.dumps([list(loader) for _ in range(3)]))
