"""A program that has forked a process and whose workers hold the GIL in C code; it waits to be killed.

Arguments: the class of the reading service, and how workers are started.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Any

import wds_datapipes

from torch.utils.data.datapipes.iter import IterableWrapper  # isort: skip
from torchdata import dataloader2  # isort: skip  # its banner is silenced by the import above

LONG_S = 1000


def hold(number: int) -> int:
    print("worker", os.getpid(), flush=True)
    return int(ctypes.PyDLL(None).sleep(LONG_S)) + number


def main(kind: str, method: str) -> None:
    # The import above has patched torchdata's own service.
    service: Any = getattr(wds_datapipes if kind == "ShardReadingService" else dataloader2, kind)
    pipe = IterableWrapper(range(10)).sharding_filter().map(hold)
    loader: Any = dataloader2.DataLoader2(pipe, reading_service=service(1, multiprocessing_context=method))
    items = iter(loader)
    threading.Thread(target=next, args=(items,), daemon=True).start()
    os.read(0, 1)  # sys.stdin has a lock that a worker forked in the meantime would need
    if fork := os.fork():
        print("fork", fork, flush=True)
    time.sleep(LONG_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
