"""For tests of pipelines and of stages, yours and ours: make shards, hold a stage to its contract, break runs off."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import tarfile
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed

__all__ = ["build_shard", "check_coverage", "check_resume", "check_stage"]


def build_shard(
    path: str | os.PathLike[str],
    samples: Iterable[Mapping[str, bytes | str]],
    *,
    tar_format: int = tarfile.USTAR_FORMAT,
    end_marker: bool = True,
) -> str:
    """Write a shard with Python's own tarfile module, independent of this package's reader.

    Args:
        path: the file to write; compressed if its name ends in ``gz``, ``bz2`` or ``xz``.
        samples: each with ``__key__`` and its fields as bytes; the fields are written in their order. Fields that begin
            with two underscores are not written.
        tar_format: one of tarfile's formats.
        end_marker: write the two blocks of zeros that end an archive, and the blocks that fill up its last record.

    Returns:
        The path, as ``str``.

    Examples:
        >>> build_shard("a.tar", [{"__key__": "000", "txt": b"hello", "cls": b"7"}])
        'a.tar'
    """
    name = os.fspath(path)
    compression = next((kind for kind in ("gz", "bz2", "xz") if name.endswith(kind)), "")
    with tarfile.open(name, f"w:{compression}", format=tar_format) as archive:  # type: ignore[call-overload]  # a mode that is made up
        for sample in samples:
            for field, value in sample.items():
                if not field.startswith("__"):
                    member = tarfile.TarInfo(f"{sample['__key__']!s}.{field}")
                    data = value.encode() if isinstance(value, str) else value
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        end = archive.offset
    if not end_marker:
        if compression:
            raise ValueError(f"{name} is compressed, so its end marker cannot be cut off")
        os.truncate(name, end)
    return name


def check_stage(make_pipe: Callable[[], IterDataPipe[Any]]) -> None:
    """Check what every loader expects of a stage.

    Its ``__iter__`` is a generator function (another kind that fails before its first item makes DataLoader2 wait for
    ever); it is pickled before, during and after an iteration; it is iterated again after a whole and after a
    broken-off iteration, each time with the same items under the same seed; it does the same in a worker process; and
    torch finds its sources, to seed and to shard them.

    Args:
        make_pipe: builds a new pipeline that ends in the stage and yields at least two items.

    Raises:
        AssertionError: the stage breaks the contract, with the sentence that it breaks.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> check_stage(lambda: IterableWrapper([{"a": 1}, {"a": 2}]).to_tuple("a"))
    """
    pipe = make_pipe()
    name = type(pipe).__name__
    assert inspect.isgeneratorfunction(type(pipe).__iter__), f"{name}.__iter__ is not a generator function"
    expected = _items(pipe)
    assert len(expected) >= 2, f"{name} yields {len(expected)} items here, and the contract needs two to be checked"
    assert _same(_items(pipe), expected), f"{name} yields other items when it is iterated again"
    assert _same(_items(make_pipe()), expected), f"{name} yields other items when it is built again"

    assert _same(_items(pickle.loads(pickle.dumps(make_pipe()))), expected), f"{name} changes when it is pickled"
    started = _seeded(make_pipe())
    iterator = iter(started)
    next(iterator)
    pickle.dumps(started)  # raises where an open file or a generator sits in an attribute
    del iterator
    assert _same(_items(started), expected), f"{name} yields other items after an iteration that was broken off"
    assert _same(_items(pickle.loads(pickle.dumps(started))), expected), f"{name} changes when it is pickled after use"

    loader = DataLoader(make_pipe(), batch_size=None, num_workers=1, generator=torch.Generator().manual_seed(0))
    received = list(loader)
    assert len(received) == len(expected), f"{name} yields {len(received)} items in a worker, not {len(expected)}"

    values = [each for value in vars(pipe).values() for each in (value if isinstance(value, tuple) else (value,))]
    sources = [value for value in values if isinstance(value, IterDataPipe)]
    found = {id(child) for child, _ in next(iter(traverse_dps(pipe).values()))[1].values()}
    assert found == {id(source) for source in sources}, f"torch does not find the sources of {name} in its graph"


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
        >>> shard = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(5)])
        >>> check_resume(lambda: ShardList("a.tar").load_wds_shards().group_samples().shuffle_samples(3))
        >>> check_resume(lambda: ShardList("a.tar").load_wds_shards().group_samples().shuffle(buffer_size=3))
        Traceback (most recent call last):
        AssertionError: After 0 of 5 items, there is no state: Shuffler may hold samples back, and cannot tell which...
    """
    if cuts < 2:
        raise ValueError(f"check_resume needs 2 cuts or more, the beginning and the end, not {cuts}")
    from wds_datapipes.core.optional import require

    require("torchdata.dataloader2", extra="dataloader2", purpose="check how a pipeline resumes")
    from wds_datapipes.reading.rehearsal import rehearse_resume

    rehearse_resume(make_pipeline, workers=workers, cuts=cuts, seed=seed, same=_same)


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
    from wds_datapipes.reading.coverage import rehearse_coverage

    rehearse_coverage(make_pipeline, ranks=ranks, workers=workers, seed=seed, key=key)


def _seeded(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    apply_random_seed(pipe, torch.Generator().manual_seed(0))
    return pipe


def _items(pipe: IterDataPipe[Any]) -> list[Any]:
    return list(_seeded(pipe))


def _same(left: Any, right: Any) -> bool:
    """Whether two items are equal, with arrays and tensors compared by type, shape and content."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)
