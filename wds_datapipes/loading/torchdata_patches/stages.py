"""Replacements for methods of torchdata's stages: a ``.cycle()`` that ends, and guards for prefetching threads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchdata.datapipes.iter import Cycler

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import EmptySourceError, WorkerDiedError
from wds_datapipes.loading.workers.connection import set_reader
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.groups import groups_of
from wds_datapipes.pipes.inspection import count_yielded, name_of, sources_of
from wds_datapipes.pipes.instance import instance_in
from wds_datapipes.pipes.sharding import rotation_period
from wds_datapipes.samples.epochs import EMPTY_PASSES


class EndingCycler(Cycler):  # type: ignore[misc]  # torchdata has no types
    """torchdata's ``Cycler``, but it ends in a worker without a share of the data.

    Raises:
        EmptySourceError: no worker of this rank has a share, or many passes in a row yielded nothing.
    """

    def __iter__(self) -> Iterator[Any]:
        empty = 0
        for _ in itertools.count() if self.count is None else range(self.count):
            has_items = False
            for item in self.source_datapipe:
                has_items = True
                yield item
                del item  # free it while the next one is produced
            empty = 0 if has_items else empty + 1
            if self.count is None and empty > 0:
                if has_no_share(self.source_datapipe):
                    return
                # Stages that read shards notice it earlier, with more details.
                if empty > EMPTY_PASSES * rotation_period(self.source_datapipe):
                    raise EmptySourceError(
                        f"cycle() has read its source, {name_of(self.source_datapipe)}, {empty} times in a row, but it "
                        "yielded nothing. Is the list of shards empty?"
                    )


def has_no_share(pipe: Any) -> bool:
    """Whether this instance has no share of the data, judged after a pass in which the pipeline yielded nothing.

    Raises:
        EmptySourceError: no worker of this rank has a share.
    """
    for splitter in graph_of(pipe).splitters:
        if count_yielded(splitter) > 0:
            continue
        sources = [source for source in sources_of(splitter) if isinstance(source, IterDataPipe)]
        if not sources:  # it splits its own data
            return True
        count, groups = max(map(count_yielded, sources)), groups_of(splitter)
        if count == 0:
            continue
        if groups:
            own = instance_in(groups)
            if own.rank >= count:  # not even the rank's first worker, number `own.rank`, has one
                raise EmptySourceError(
                    f"Rank {own.rank} of {own.ranks} has none of the {count} shards, so cycle() has nothing to repeat "
                    "there, and the other ranks would wait for it. Use at least as many shards as ranks, or "
                    ".with_epoch(n) instead, in which each rank has n items"
                )
        return True
    return False


def guard_thread(fill: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``thread_worker`` of a torchdata prefetcher so that its thread never ends silently."""

    @functools.wraps(fill)
    def thread_worker(prefetch_data: Any, *args: Any) -> None:
        set_reader(prefetch_data)
        prefetch_data.source_datapipe = _deliver(prefetch_data.source_datapipe, prefetch_data.prefetch_buffer.append)
        try:
            fill(prefetch_data, *args)
        finally:
            set_reader(None)

    return thread_worker


def _deliver(source: Iterable[Any], deliver: Callable[[Exception], None]) -> Iterator[Any]:
    """Yield from ``source``; deliver its exception and end.

    torchdata's thread reports that it has stopped before it delivers the error, so a reader may see the end of the
    epoch instead. It catches neither exceptions of ``iter`` nor ``SystemExit``.
    """
    try:
        yield from source
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - the reader of the buffer raises it
        deliver(error)
    except BaseException as error:  # noqa: BLE001 - a reader would treat a non-Exception as an item
        died = WorkerDiedError(
            f"The pipeline raised {error!r} in a prefetch thread, where it ends only that thread. "
            "Code in a pipeline must not call exit()."
        )
        died.__cause__ = error
        deliver(died)
