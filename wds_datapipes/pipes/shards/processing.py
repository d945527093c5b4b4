"""The stage that runs a pipeline for each shard on other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

from wds_datapipes.arguments import check_integer
from wds_datapipes.counters import Skipped, sum_skipped
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import ExecutorHandle, run_in_order
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import check_shard_list
from wds_datapipes.pipes.inspection import takes_seed, upstream
from wds_datapipes.pipes.shards.shard_list import shuffle_whole_lists
from wds_datapipes.pipes.stage import EngineStage, OpaqueValue, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage, derive_later_seeds
from wds_datapipes.pipes.state.shard_order import ShardOrder, listings_before
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.position import SamplePosition


@register_stage("process_shards")
class ShardProcessor(SeededStage, EngineStage[Any]):
    """Run a pipeline for each shard on the processes of a cluster (functional name: ``process_shards``).

    Each shard is read, decoded and batched by one task, and its items return in the order of the shards. So the
    items come exactly once and in the same order for any number of processes. At most ``prefetch_shards`` shards are
    processed ahead: if the training loop is slow, the cluster waits. Put ``.shuffle()`` and ``.sharding_filter()``
    before this stage, everything else into the pipeline of a shard, and use a loader without workers.

    If a process dies, Dask and Ray run its task again elsewhere. A state contains the number of shards and the number
    of items of the current one, which is processed again to resume.

    Yields:
        Any: the items of the pipelines, such as batches.

    Args:
        source: URLs of shards.
        build: takes a list of one URL and returns the pipeline of that shard. It is sent to the processes, so
            define it in a module that they can import.
        executor: an executor of ``concurrent.futures``: ``client.get_executor()`` of Dask, or any other.
        prefetch_shards: how many shards are processed ahead of the one whose items are being yielded.

    Raises:
        WorkerDiedError: the executor does not replace a process that has died.
        RuntimeError: it is used in a worker process of a loader.
        StateError: a loaded state was saved with other shards.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from wds_datapipes import ShardList
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": f"{n}"} for n in range(3)])
        >>> def batches(urls):
        ...     return ShardList(urls).load_wds_shards().group_samples().wds_decode().to_tuple("cls").batch(2)
        >>> with ThreadPoolExecutor(2) as executor:
        ...     list(ShardList("{a,b}.tar").process_shards(batches, executor=executor))
        [[(0,), (1,)], [(2,)], [(0,), (1,)], [(2,)]]
    """

    has_position = True
    combines_samples = True
    shares_seed = True
    ignored_arguments = frozenset({"executor", "prefetch_shards"})

    def __init__(
        self,
        source: IterDataPipe[str],
        build: Callable[[list[str]], IterDataPipe[Any]],
        *,
        executor: Executor,
        prefetch_shards: int = 4,
    ) -> None:
        prefetch_shards = check_integer("prefetch_shards", prefetch_shards, 0)
        shuffle_whole_lists(source)
        self.source = source
        self._prefetch_shards = prefetch_shards
        self._build = OpaqueValue(build)
        self._executor = ExecutorHandle.of(executor)
        self._shards = self._items = 0
        self._listings = OpaqueValue(list[ShardOrder]())
        self._loaded: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded or {}, None
        self._shards, self._items = loaded.get("shards", 0), 0
        self._listings.value = listings_before(self.source)
        for listing, seen in zip(self._listings.value, loaded.get("listed", ()), strict=False):
            listing.expect(seen)
        work = partial(process_shard, self._build.value, seed=self.take_seed())
        urls, to_skip = iter(self.source), loaded.get("items", 0)
        if (found := sum(1 for _ in islice(urls, self._shards))) < self._shards:
            raise StateError(
                f"The state was saved after {self._shards} shards of process_shards, and there are only {found} now. "
                "Resume with the same shards"
            )
        with closing(run_in_order(self._executor.get(), work, urls, self._prefetch_shards)) as results:
            for url, (items, skipped) in results:
                self.counters.add_skipped(skipped)
                for self._items, item in enumerate(items, 1):
                    if self._items > to_skip:
                        yield item
                if self._items < to_skip:
                    raise StateError(
                        f"The state was saved after {to_skip} items of {redact(url)}, which yields only {self._items} "
                        "now. Resume with the same shards and the same function"
                    )
                self._shards, self._items, to_skip = self._shards + 1, 0, 0

    def check_position(self) -> None:
        """Make sure that the list of shards can be reproduced from its seeds."""
        check_shard_list(self.source)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished shards, and that of the items of the current one."""
        if self._loaded is not None:
            return dict(self._loaded)
        listed = [listing.seen for listing in self._listings.value]
        return {"shards": self._shards, "items": self._items, **({"listed": listed} if listed else {})}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        again: Iterable[SamplePosition] = (),  # noqa: ARG002  as it combines samples, there are none
    ) -> None:
        """Load a state, from which the next iteration resumes."""
        self._loaded = state


def process_shard(build: Callable[[list[str]], IterDataPipe[Any]], url: str, *, seed: int) -> tuple[list[Any], Skipped]:
    """Return the items of a shard's pipeline, and what its stages have skipped; this runs on the cluster.

    Raises:
        TypeError: the function of the user returned something else than a pipeline.
    """
    pipe = build([url])
    if not isinstance(pipe, IterDataPipe):
        raise TypeError(f"process_shards needs a function that returns a pipeline, not {type(pipe).__name__}")
    derive_later_seeds(pipe)
    for number, stage in enumerate(upstream(pipe)):
        if takes_seed(stage):
            stage.set_seed(derived_seed("process_shards", seed, url, number))
    items = list(pipe)
    counters = {id(each): each for each in (declared(stage).counters for stage in upstream(pipe))}
    return items, sum_skipped(each.skipped() for each in counters.values())
