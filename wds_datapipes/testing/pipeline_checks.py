"""Checks of a whole pipeline: exact resuming, and complete sharding among ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.extras import require
from wds_datapipes.testing.coverage import simulate_ranks
from wds_datapipes.testing.stage_contract import same_items

__all__ = ["check_coverage", "check_resume"]


def check_resume(
    make_pipeline: Callable[[], IterDataPipe[Any]], *, workers: int = 0, cuts: int = 20, seed: int = 0
) -> None:
    """Check that a pipeline resumes exactly from a saved state.

    A state is saved at several positions of an epoch, and each state is loaded in a new interpreter. The items that
    follow there, and those of the next epoch, must be the same as here. All states must have the same structure. The
    loader is a ``DataLoader2`` with a `ShardReadingService`.

    The other process is spawned: a script needs ``if __name__ == "__main__":``, and functions in the pipeline must be
    picklable.

    Args:
        make_pipeline: builds a new pipeline; its epochs must be finite.
        workers: the number of worker processes.
        cuts: the maximum number of positions at which a state is saved, at least 2: after every item if there are
            fewer, otherwise evenly spaced, including the beginning and the end.
        seed: the seed of the loader.

    Raises:
        AssertionError: the items differ; the message names the position and the first different item. Or the pipeline
            has no state, or is not reproducible with the same seed.
        ValueError: an argument is invalid.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(5)])
        >>> check_resume(lambda: ShardList("a.tar").load_wds_shards().group_samples().shuffle_samples(3))
        >>> def make_stream():
        ...     pipe = ShardList("a.tar").load_wds_shards().group_samples()
        ...     return pipe.shuffle(buffer_size=3).with_epoch(5)
        >>> check_resume(make_stream)
        Traceback (most recent call last):
        AssertionError: After 0 of 5 items, there is no state: Shuffler has no position in the shards. Use ...
    """
    if cuts < 2:
        raise ValueError(f"check_resume needs at least 2 cuts, the beginning and the end, not {cuts}")
    require("torchdata.dataloader2", extra="dataloader2", purpose="check how a pipeline resumes")
    from wds_datapipes.testing.resume_laws import compare_resumed_runs

    compare_resumed_runs(make_pipeline, workers=workers, cuts=cuts, seed=seed, same=same_items)


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
    would assign. The items before the split, that is, the order of the shards, must be the same for all of them.

    Args:
        make_pipeline: builds a new pipeline. Without a split, it must yield each sample as often as expected. Leave out
            batching, since the last batch of each share is smaller.
        ranks: the number of ranks.
        workers: the number of workers per rank; 0 counts as one.
        seed: the seed of the loader.
        key: returns an identifier of an item. By default, ``__url__`` and ``__key__`` of a sample, and any other item
            as a whole.

    Raises:
        AssertionError: a sample occurs too often or not often enough, or an order differs; the message names the
            sample, the ranks and the workers. Or the pipeline yields nothing.
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
    simulate_ranks(make_pipeline, ranks=ranks, workers=workers, seed=seed, key=key)
