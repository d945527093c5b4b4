"""Guards of the threads of torchdata's ``.prefetch()`` and ``.pin_memory()``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.workers.connection import set_reader

#: The polling interval while a prefetcher's thread pauses, in seconds.
PAUSE_CHECK_S = 1e-3


def guard_thread(fill: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``thread_worker`` of one of torchdata's prefetchers so that its thread never ends silently."""

    @functools.wraps(fill)
    def thread_worker(prefetch_data: Any, *args: Any) -> None:
        set_reader(prefetch_data)
        prefetch_data.source_datapipe = _deliver(prefetch_data.source_datapipe, prefetch_data.prefetch_buffer.append)
        try:
            fill(prefetch_data, *args)
        finally:
            set_reader(None)

    return thread_worker


def pause(prefetcher: Any) -> None:
    """Pause one of torchdata's prefetchers: wait until its thread has stopped making items, or has ended."""
    if prefetcher.thread is not None:
        data = prefetcher.prefetch_data
        data.run_prefetcher = False
        data.paused = False  # it may remain from an earlier pause; the thread sets it repeatedly
        while not data.paused and prefetcher.thread.is_alive():
            prefetcher.thread.join(PAUSE_CHECK_S)


def _deliver(source: Iterable[Any], deliver: Callable[[Exception], None]) -> Iterator[Any]:
    """Yield from ``source``; deliver its exception, and end.

    torchdata's thread reports that it has stopped before it delivers the error, so that a reader in between mistakes
    the error for the end of the epoch. It catches neither the exceptions of ``iter`` nor ``SystemExit``.
    """
    try:
        yield from source
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - the reader of the buffer raises it
        deliver(error)
    except BaseException as error:  # noqa: BLE001 - a reader would treat it as an item if it is not an Exception
        died = WorkerDiedError(
            f"The pipeline raised {error!r} in a prefetch thread, where it ends only that thread. "
            "Code that a pipeline runs must not call exit()."
        )
        died.__cause__ = error
        deliver(died)
