"""Processes that use a cache of samples: run with ``killed``, or with ``rank`` and its number."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator

from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import IterDataPipe

import wds_datapipes
from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.pipes import SampleCacher


class Deadly(IterDataPipe[int]):
    """Kills its process after a number of items, some of which are already in the file."""

    def __iter__(self) -> Iterator[int]:
        yield from range(200_000)
        os.kill(os.getpid(), signal.SIGKILL)


def read_as_rank(number: int) -> None:
    """Print the keys of two epochs."""
    from torchdata.dataloader2 import DataLoader2

    init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=number, world_size=2)
    samples = ShardList("{0..6}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = samples.cache_samples("kept").to_tuple("__key__")
    loader = DataLoader2(pipe, reading_service=ShardReadingService(2, distributed=True))
    print(json.dumps([[key for (key,) in loader] for _ in range(2)]))
    loader.shutdown()
    destroy_process_group()


if __name__ == "__main__":
    assert wds_datapipes.__all__
    if sys.argv[1] == "killed":
        list(SampleCacher(Deadly(), "kept"))
    else:
        read_as_rank(int(sys.argv[2]))
