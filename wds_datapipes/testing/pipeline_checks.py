"""Checks of a whole pipeline: that it resumes exactly, and that ranks and workers share all samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.extras import require
from wds_datapipes.testing.coverage import rehearse_coverage
from wds_datapipes.testing.stage_contract import same_items

__all__ = ["check_coverage", "check_resume"]


def check_resume(
    make_pipeline: Callable[[], IterDataPipe[Any]], *, workers: int = 0, cuts: int = 20, seed: int = 0
) -> None:
    """Check that a pipeline goes on from a saved state exactly where it was.

    Its state is saved after items of an epoch, and each state is loaded in a process with a new interpreter. What
    follows there has to be what follows here, and so has the epoch after it. All states have to name the same things.
    `DataLoader2` with a `ShardReadingService` does the loading.

    The other process is spawned: a script needs ``if __name__ == "__main__":``, and functions in the pipeline have to
    be picklable.

    Args:
        make_pipeline: builds the pipeline anew; its epochs have an end.
        workers: how many worker processes there are.
        cuts: after how many items, at the most, a state is saved: after each if there are fewer, or else at even
            distances, with the beginning and the end; at least 2.
        seed: of the loader.

    Raises:
        AssertionError: something differs; it tells the place, and the first item that does. Or the pipeline has no
            state, or does not repeat itself with the same seed.
        ValueError: an argument makes no sense.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(5)])
        >>> check_resume(lambda: ShardList("a.tar").load_wds_shards().group_samples().shuffle_samples(3))
        >>> def make_stream():
        ...     pipe = ShardList("a.tar").load_wds_shards().group_samples()
        ...     return pipe.shuffle(buffer_size=3).with_epoch(5)
        >>> check_resume(make_stream)
        Traceback (most recent call last):
        AssertionError: After 0 of 5 items, there is no state: Shuffler may hold samples back, and cannot tell which...
    """
    if cuts < 2:
        raise ValueError(f"check_resume needs 2 cuts or more, the beginning and the end, not {cuts}")
    require("torchdata.dataloader2", extra="dataloader2", purpose="check how a pipeline resumes")
    from wds_datapipes.testing.resume_laws import rehearse_resume

    rehearse_resume(make_pipeline, workers=workers, cuts=cuts, seed=seed, same=same_items)


def check_coverage(
    make_pipeline: Callable[[], IterDataPipe[Any]],
    *,
    ranks: int = 2,
    workers: int = 2,
    seed: int = 0,
    key: Callable[[Any], Hashable] | None = None,
) -> None:
    """Check that ranks and workers have all samples between them, each of them once, in two epochs.

    Each worker of each rank gets its share and its seeds as from the loader, one after the other in this process. What
    comes before the split, which is the order of the shards, has to be the same for all of them.

    Args:
        make_pipeline: builds the pipeline anew. Without a split, it yields each sample as often as it has to come. What
            batches samples is best left out, since shares end in batches of their own.
        ranks: how many ranks there are.
        workers: how many workers each of them has; 0 is one, too.
        seed: of the loader.
        key: returns what an item is known by. By default, that is ``__url__`` and ``__key__`` of a sample, and
            the whole of any other item.

    Raises:
        AssertionError: a sample comes too often or not often enough, or an order differs; it tells which and where. Or
            the pipeline yields nothing.
        ValueError: an argument makes no sense.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "abc":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": f"{n}"} for n in range(2)])
        >>> def pipeline(shards):
        ...     return shards.load_wds_shards().group_samples()
        >>> check_coverage(lambda: pipeline(ShardList("{a..c}.tar").shuffle().sharding_filter()))
        >>> check_coverage(lambda: pipeline(ShardList("{a..c}.tar")), workers=0)
        Traceback (most recent call last):
        AssertionError: Epoch 0: ('a.tar', 'a0') has to come once, and comes 2 times (rank 0, worker 0, rank 1, ...
    """
    if ranks < 1 or workers < 0:
        raise ValueError(f"check_coverage needs 1 rank or more, and 0 workers or more, not {ranks} and {workers}")
    rehearse_coverage(make_pipeline, ranks=ranks, workers=workers, seed=seed, key=key)
