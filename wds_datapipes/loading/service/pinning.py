"""Copying of batches to page-locked memory, one step ahead of the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as torch_pinning

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.loading.workers.connection import Reader, set_reader
from wds_datapipes.pipes.roles import Loader
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.user_warnings import warn_user

#: How long to wait for the thread to end, in seconds. It takes longer only while it waits for a worker.
JOIN_S = 0.1

_END = object()


class MemoryPinner(Loader, Stage[Any]):
    """Applies a function to the items of the main process, in a thread, one item ahead of the loop.

    torchdata's own ``pin_memory`` stage polls ten thousand times per second.

    Args:
        source: the source of the items.
        pin: the function applied to each item.
    """

    def __init__(self, source: IterDataPipe[Any], pin: Callable[[Any], Any]) -> None:
        self.source = source
        self.pin = pin

    def __iter__(self) -> Iterator[Any]:
        wanted: SimpleQueue[Future[Any] | None] = SimpleQueue()
        reader = Reader()
        # A daemon, because it may wait for a worker forever, and the interpreter ends workers only after other threads.
        thread = Thread(target=self._run, args=(iter(self.source), wanted, reader), name="pin-memory", daemon=True)
        coming: Future[Any] | None = None
        try:
            with defer_interrupts():
                thread.start()
            wanted.put(coming := Future())
            while (item := coming.result()) is not _END:
                wanted.put(coming := Future())
                yield item
                del item  # frees its memory while waiting for the next one
        finally:
            del coming  # it may hold an error that references this frame
            reader.stop_iteration = True
            wanted.put(None)
            # During interpreter shutdown, the thread no longer runs, and any thread may garbage-collect this generator.
            # After Ctrl-C, do not wait for a slow worker: the thread soon stops waiting for it.
            if not sys.is_finalizing() and thread is not current_thread() and thread.is_alive():
                thread.join(JOIN_S)

    def _run(self, items: Iterator[Any], wanted: SimpleQueue[Future[Any] | None], reader: Reader) -> None:
        """Make items on request."""
        set_reader(reader)
        while (coming := wanted.get()) is not None:
            self._make(items, coming)

    def _make(self, items: Iterator[Any], coming: Future[Any]) -> None:
        try:
            for item in items:
                coming.set_result(self.pin(item))
                return
            coming.set_result(_END)
        except BaseException as error:  # noqa: BLE001 - taking the item raises it
            coming.set_exception(error)
            del coming  # it holds the error that references this frame

    def is_replicable(self) -> bool:
        """Return False: it runs only in the main process."""
        return False


def pin_memory_of(source: IterDataPipe[Any]) -> IterDataPipe[Any]:
    """Return a pipe that copies tensors to page-locked memory; without CUDA, warn and return ``source``."""
    if not torch.cuda.is_available():
        warn_user("pin_memory=True has no effect, because CUDA is not available.")
        return source
    return MemoryPinner(source, partial(_pin, torch.cuda.current_device()))


def _pin(device: int, item: Any) -> Any:
    torch.cuda.set_device(device)  # a new thread starts with device 0, and would allocate memory there
    pin: Callable[[Any], Any] = torch_pinning.pin_memory
    return pin(item)
