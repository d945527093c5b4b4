"""Coverage check: simulates ranks and workers in one process, and counts how often each sample occurs."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from itertools import product
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.epoch import Epoch
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart
from wds_datapipes.loading.splitting import split_by_rank, split_by_worker
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.redaction import short_repr
from wds_datapipes.seeds import SeedGenerator
from wds_datapipes.types import Instance


def check_coverage(
    make_pipeline: Callable[[], IterDataPipe[Any]],
    *,
    ranks: int = 2,
    workers: int = 2,
    seed: int = 0,
    key: Callable[[Any], Hashable] | None = None,
) -> None:
    """Check that ranks and workers together yield all samples exactly once, in two epochs.

    The workers of all ranks are simulated in this process, one after the other, with the shares and seeds that a loader
    would assign.

    Args:
        make_pipeline: builds a new pipeline. Without a split, it must yield each sample as often as expected. Leave out
            batching, since the last batch of each share is smaller.
        ranks: the number of ranks.
        workers: the number of workers per rank; 0 counts as one.
        seed: the seed of the loader.
        key: returns an identifier of an item. By default, ``__url__`` and ``__key__`` of a sample, and any other item
            as a whole.

    Raises:
        AssertionError: a sample occurs too often or not often enough; the message names the sample, the ranks and the
            workers. Or the pipeline yields nothing.
        ValueError: an argument is invalid.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "abc":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": f"{n}"} for n in range(2)])
        >>> def pipeline(shards):
        ...     return shards.load_wds_shards().group_samples()
        >>> check_coverage(lambda: pipeline(ShardList("{a..c}.tar").shuffle().sharding_filter()))
        >>> check_coverage(lambda: pipeline(ShardList("{a..c}.tar")), workers=0)
        Traceback (most recent call last):
        AssertionError: Epoch 0: ('a.tar', 'a0') should occur once, but occurs 2 times (rank 0, worker 0, rank 1, ...
    """
    if ranks < 1 or workers < 0:
        raise ValueError(f"check_coverage needs at least 1 rank and 0 workers, not {ranks} and {workers}")
    key_of = _item_key if key is None else key
    whole = EpochRun(make_pipeline(), EpochStart(SeedGenerator(seed), owns_generators=True)).items
    expected = Counter(map(key_of, whole))
    if not expected:
        raise AssertionError(
            "The pipeline yields nothing, even without a split. Is its list of shards empty, or does a stage "
            "drop all samples?"
        )
    epochs: list[dict[Any, list[str]]] = [defaultdict(list), defaultdict(list)]
    for rank, worker in product(range(ranks), range(max(workers, 1))):
        instance = Instance(rank, ranks, worker, workers)
        pipe = split_by_worker(split_by_rank(make_pipeline(), instance), instance)
        current = Epoch.before(seed)
        for owners in epochs:
            current = current.follow(seed if current.next is None else current.next)
            own = SeedGenerator(current.seed).spawn(rank).spawn(worker)
            for item in EpochRun(pipe, EpochStart(own, owns_generators=True)).items:
                owners[key_of(item)].append(f"rank {rank}, worker {worker}")
    for epoch, owners in enumerate(epochs):
        for item in {**expected, **owners}:
            found = owners.get(item, [])
            if len(found) != expected[item]:
                advice = (
                    ""
                    if graph_of(pipe).splitters
                    else ". No stage splits the data: add .sharding_filter() to the shards"
                )
                raise AssertionError(
                    f"Epoch {epoch}: {item!r} should occur {_times(expected[item])}, but occurs {_times(len(found))} "
                    f"({', '.join(found) or 'never'}){advice}"
                )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _item_key(item: Any) -> Hashable:
    """Return the URL and key of a sample, or any other item in a hashable form."""
    if isinstance(item, Mapping) and "__key__" in item:
        return str(item.get("__url__", "")), item["__key__"]
    try:
        hash(item)
    except TypeError:
        return _PickledItem(pickle.dumps(item))
    return item  # type: ignore[no-any-return]  # hashable


class _PickledItem(bytes):
    """The pickle of an item that is not hashable; messages show the item."""

    __slots__ = ()

    def __repr__(self) -> str:
        return short_repr(pickle.loads(self))
