"""Reads as a rank of torchrun: fails at first, in the middle of an epoch, and succeeds once torchrun has restarted all.

Its argument is a folder, to which each rank writes its results as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from wds_datapipes import ShardReadingService

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip
from torchdata.datapipes.iter import IterableWrapper  # isort: skip

#: The number of items of each rank in an epoch.
SHARE = 20

#: The time limit of what a rank waits for, in seconds.
LIMIT_S = 300.0

FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


def tidy_up(found: Path) -> None:
    """Remove the keys that gloo leaves in the store of restarted ranks, because gloo itself fails on them."""
    if os.environ["RANK"] == "0":
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        ours = [name for name in store.list_keys() if "wds_datapipes" in name]
        for name in {*store.list_keys()} - {*ours}:
            store.delete_key(name)
        hidden = found.with_name(".found")
        hidden.write_text("\n".join(ours))
        hidden.rename(found)
    while not found.exists():  # torchrun ends the ranks if this takes too long
        time.sleep(0.02)


def epochs_of(rank: int, world: int) -> list[list[Any]]:
    pipe = IterableWrapper(range(world * SHARE), deepcopy=False).sharding_filter()
    loader = DataLoader2(pipe, reading_service=ShardReadingService(1, timeout_s=60, distributed=True))
    epochs: list[list[Any]] = []
    for _ in range(3):
        epochs.append([])
        for item in loader:
            epochs[-1].append(item)
            if FIRST:
                if rank == 1:
                    raise LookupError("no such label")
                time.sleep(LIMIT_S)  # until torchrun ends this
    loader.shutdown()
    return epochs


def main() -> None:
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with torchrun
    folder = Path(sys.argv[1])
    if not FIRST:
        tidy_up(folder / "found")
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(epochs_of(rank, dist.get_world_size())))


if __name__ == "__main__":
    main()
