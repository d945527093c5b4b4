"""Threads that fill a prefetch buffer: they deliver every error, and end with their reader."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_datapipes.errors import WorkerDiedError

__all__ = ["Reader", "given_up", "guard_thread", "pause", "work_for"]

#: How often a prefetcher's thread that is to pause is looked at, in seconds.
PAUSE_CHECK_S = 1e-3

#: ``_filling.data`` is, in a thread that fills a buffer, the state it shares with the buffer's reader.
_filling = threading.local()


class Reader:
    """What a thread that makes items shares with their reader.

    Attributes:
        stop_iteration: whether the reader wants no more; the name is torchdata's.
    """

    stop_iteration = False


def work_for(reader: Reader) -> None:
    """Let `given_up` tell, in this thread, whether a reader wants no more."""
    _filling.data = reader


def guard_thread(fill: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``thread_worker`` of one of torchdata's prefetchers so that nothing ends its thread in silence."""

    @functools.wraps(fill)
    def thread_worker(prefetch_data: Any, *args: Any) -> None:
        _filling.data = prefetch_data
        prefetch_data.source_datapipe = _deliver(prefetch_data.source_datapipe, prefetch_data.prefetch_buffer.append)
        try:
            fill(prefetch_data, *args)
        finally:
            _filling.data = None

    return thread_worker


def pause(prefetcher: Any) -> None:
    """Pause one of torchdata's prefetchers: wait until its thread makes nothing any more, or has ended."""
    if prefetcher.thread is not None:
        data = prefetcher.prefetch_data
        data.run_prefetcher = False
        data.paused = False  # it may be left from another pause; the thread says it again and again
        while not data.paused and prefetcher.thread.is_alive():
            prefetcher.thread.join(PAUSE_CHECK_S)


def given_up() -> bool:
    """Whether the current thread fills a prefetch buffer that nobody will read any further."""
    data = getattr(_filling, "data", None)
    return data is not None and bool(data.stop_iteration)


def _deliver(source: Iterable[Any], deliver: Callable[[Exception], None]) -> Iterator[Any]:
    """Yield from ``source``; deliver what it raises, and end.

    torchdata's thread says that it has stopped before it hands the error over, so that a reader who looks in between
    takes the error for the end of the epoch. It does not catch what ``iter`` raises, nor ``SystemExit``.
    """
    try:
        yield from source
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - the reader of the buffer raises it
        deliver(error)
    except BaseException as error:  # noqa: BLE001 - a reader takes it for an item if it is not an Exception
        died = WorkerDiedError(
            f"The pipeline raised {error!r} in a prefetch thread, where it ends the thread alone. "
            "Code that a pipeline runs must not call exit()."
        )
        died.__cause__ = error
        deliver(died)
