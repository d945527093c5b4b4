"""Epochs of a `ShardReadingService` that restart repeatedly while a worker does not read its requests."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import WorkerTimeoutError
from wds_datapipes.loading.transport.protocol import Kind, new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import ReceiverGone, Sender
from wds_datapipes.loading.workers.process_connection import ProcessConnection
from wds_datapipes.testing import build_shard

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the imports above

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("nothing_left")]

#: More than a socket can buffer.
RESTARTS = 300


@contextmanager
def loading(folder: Path, **options: Any) -> Iterator[Any]:
    for name in "ab":
        build_shard(folder / f"{name}.tar", [{"__key__": f"{name}{number}", "txt": b""} for number in range(3)])
    pipe = ShardList(str(folder / "{a,b}.tar")).sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
    with DataLoader2(pipe, reading_service=ShardReadingService(2, **options)) as loader:
        assert [key for (key,) in loader] == ["a0", "b0", "a1", "b1", "a2", "b2"]
        yield loader


def restart(loader: Any, begun: list[int], is_woken: threading.Event) -> None:
    """Start epochs, and take an item of the first worker in each, until the other worker is woken."""
    for number in itertools.count():
        assert next(iter(loader)) == ("a0",)
        begun[:] = [number]
        if is_woken.is_set():
            break


def test_an_unresponsive_worker_is_waited_for(tmp_path: Path) -> None:
    with loading(tmp_path) as loader:
        pid, begun = loader.reading_service.report().workers[1].pid, [0]
        is_over, is_woken = threading.Event(), threading.Event()

        def wake() -> None:
            before = -1
            while not is_over.is_set() and begun[0] != before:  # it waits, or is very slow
                before = begun[0]
                is_over.wait(0.5)
            os.kill(pid, signal.SIGCONT)
            is_woken.set()

        os.kill(pid, signal.SIGSTOP)
        waker = threading.Thread(target=wake)
        waker.start()
        try:
            restart(loader, begun, is_woken)
        finally:
            is_over.set()
            waker.join()
        assert [key for (key,) in loader] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_worker_unresponsive_for_too_long_is_an_error(tmp_path: Path) -> None:
    with loading(tmp_path, timeout_s=600) as loader:
        loader.reading_service.loop.items._pool.workers[1]._timeout_s = 1.0  # the others may be slow on a busy machine
        os.kill(loader.reading_service.report().workers[1].pid, signal.SIGSTOP)
        with pytest.raises(WorkerTimeoutError, match=r"Worker 1 \(pid \d+\) has sent nothing for timeout_s=1 s"):
            restart(loader, [0], threading.Event())


def test_a_worker_that_waits_to_send_is_read() -> None:
    near, far = new_channel()
    link = ProcessConnection("Worker 0", Receiver(near, window=9))
    epochs = []

    def work() -> None:
        """Send more than a socket can buffer before each check for requests."""
        sender = Sender(far, window=9, together=1)
        try:
            while True:
                for _ in range(300):
                    sender.send(Kind.COUNTERS, b"\x80\x04N.")  # None
                sender.wait()
                while sender.requests:
                    epochs.append(sender.requests.popleft()[0])
        except ReceiverGone:
            sender.close()

    worker = threading.Thread(target=work)
    worker.start()
    for epoch in range(1, 2 * RESTARTS):
        link.begin(epoch, "x" * 1000)
    link.cut()
    worker.join()
    link.close()
    assert epochs == [*range(1, len(epochs) + 1)]
    assert epochs
