"""Page-locked memory for what goes to a GPU, one step ahead of the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torchdata.datapipes.utils import pin_memory_fn

__all__ = ["MemoryPinner", "pinned"]

_END = object()


class MemoryPinner(IterDataPipe[Any]):
    """Applies a function to the items of the main process, in a thread, one item ahead of the loop.

    torchdata's own ``pin_memory`` stage polls ten thousand times a second, and cannot be paused.

    Args:
        source: where the items come from.
        pin: what is done with each.
    """

    _is_child_datapipe = False

    def __init__(self, source: IterDataPipe[Any], pin: Callable[[Any], Any]) -> None:
        self.source = source
        self.pin = pin
        self._coming: Future[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.source)
        with ThreadPoolExecutor(1, "pin-memory") as thread:
            self._coming = thread.submit(self._next, items)
            while (item := self._coming.result()) is not _END:
                self._coming = thread.submit(self._next, items)
                yield item
                del item  # its memory is free while the next one is waited for

    def pause(self) -> None:
        """Wait for the item that is being made."""
        if self._coming is not None:
            wait([self._coming])

    def _next(self, items: Iterator[Any]) -> Any:
        for item in items:
            return self.pin(item)
        return _END

    def is_replicable(self) -> bool:
        """Return False: there is one, in the main process."""
        return False


def pinned(source: IterDataPipe[Any]) -> IterDataPipe[Any]:
    """Return a pipe whose tensors are in page-locked memory, or ``source`` itself, with a warning, without CUDA."""
    if not torch.cuda.is_available():
        warnings.warn("pin_memory=True has no effect, since CUDA is not available.", stacklevel=2)
        return source
    return MemoryPinner(source, partial(pin_memory_fn, device=torch.cuda.current_device()))
