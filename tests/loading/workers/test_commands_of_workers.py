"""``pipe:`` commands under a `ShardReadingService` end with their worker, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_stacks import runs

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.testing import build_shard

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the imports above

pytestmark = pytest.mark.alone

COMMANDS = ["sleep 1000 | cat", "trap '' TERM HUP; while :; do sleep 1000; done", "cat a.tar; exec >&-; sleep 1000"]


def await_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 60
    while any(map(runs, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def commands_of(worker: psutil.Process) -> list[psutil.Process]:
    """Wait until a worker sleeps in a shell, and return all processes that it has started."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = worker.children(recursive=True)
            if any(process.name() == "sleep" for process in found):
                return found
        time.sleep(0.005)


@pytest.fixture(params=COMMANDS)
def loader(request: Any, folder: Path) -> Callable[..., Any]:
    build_shard("a.tar", [{"__key__": "a", "txt": b""}])
    pipe = ShardList([f"pipe:{request.param}"] * 2).sharding_filter()
    pipe = pipe.load_wds_shards().group_samples().to_tuple("__key__")
    return lambda **options: DataLoader2(pipe, reading_service=ShardReadingService(2, **options))


@pytest.mark.usefixtures("nothing_left")
def test_a_command_ends_with_a_killed_worker(loader: Any) -> None:
    found: list[psutil.Process] = []

    def kill() -> None:
        while not (workers := dl.reading_service.report().workers if dl.reading_service is not None else ()):
            time.sleep(0.005)
        found.extend(commands_of(psutil.Process(workers[0].pid)))
        os.kill(workers[0].pid, signal.SIGKILL)

    with loader() as dl:
        killer = threading.Thread(target=kill)
        items = iter(dl)
        killer.start()
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            list(items)
        killer.join()
        await_end(found)
