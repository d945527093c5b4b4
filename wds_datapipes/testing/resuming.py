"""Check that a pipeline resumes: resume it at several positions in another process and compare the items."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from multiprocessing import get_context
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.extras import DATALOADER2, require
from wds_datapipes.testing.stage_contract import same_items

#: A placeholder for a missing item.
MISSING = object()


def check_resume(
    make_pipeline: Callable[[], IterDataPipe[Any]], *, workers: int = 0, cuts: int = 20, seed: int = 0
) -> None:
    """Check that a pipeline resumes exactly from a saved state.

    States are saved at several positions of an epoch and loaded in a new interpreter. The items that follow there, and
    those of the next epoch, must be the same as here. The loader is a ``DataLoader2`` with a `ShardReadingService`.

    The other process is spawned, so a script needs ``if __name__ == "__main__":``, and functions in the pipeline must
    be picklable.

    Args:
        make_pipeline: builds a new pipeline; its epochs must be finite.
        workers: the number of worker processes.
        cuts: the maximum number of positions at which a state is saved, at least 2: after every item if there are fewer
            items, otherwise evenly spaced, including the beginning and the end.
        seed: the seed of the loader.

    Raises:
        AssertionError: the items differ (the message names the position and the first different item), or the pipeline
            has no state or is not reproducible with the same seed.
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
    require("torchdata.dataloader2", release=DATALOADER2, purpose="check how a pipeline resumes")
    from wds_datapipes.loading.torchdata_api import serialize_datapipe

    with _loader(make_pipeline(), workers, seed) as loader:
        whole, after = list(loader), list(loader)
    with _loader(make_pipeline(), workers, seed) as loader:
        _compare(list(loader), whole, "The pipeline is not reproducible with the same seed", 0)
    chosen = _spread(len(whole), cuts)
    copied = serialize_datapipe(make_pipeline())
    elsewhere = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with elsewhere, _loader(make_pipeline(), workers, seed) as loader:
        items = iter(loader)
        for cut in range(len(whole) + 1):
            if cut in chosen:
                position = f"After {cut} of {len(whole)} items"
                try:
                    state = loader.state_dict()
                except StateError as error:
                    raise AssertionError(f"{position}, there is no state: {error}") from error
                try:
                    rest, following = elsewhere.submit(_resume, copied, workers, state).result()
                except BrokenProcessPool as error:
                    raise AssertionError(f"{position}, the other process ended") from error
                except Exception as error:
                    raise AssertionError(
                        f"{position}, another process cannot resume: {type(error).__name__}: {error}"
                    ) from error
                _compare(rest, whole[cut:], f"{position}, another process resumes with other items", cut)
                _compare(following, after, f"{position}, the epoch after the resumed one has other items", 0)
            if cut < len(whole):
                next(items)


def _resume(pipe: bytes, workers: int, state: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the rest of the epoch after a state and the next epoch."""
    from wds_datapipes.loading.torchdata_api import deserialize_datapipe

    with _loader(deserialize_datapipe(pipe), workers) as loader:
        loader.load_state_dict(state)
        return list(loader), list(loader)


def _loader(pipe: IterDataPipe[Any], workers: int, seed: int | None = None) -> Any:
    from wds_datapipes.loading.service.service import ShardReadingService
    from wds_datapipes.loading.torchdata_api import DataLoader2

    loader = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    if seed is not None:
        loader.seed(seed)
    return loader


def _spread(count: int, cuts: int) -> set[int]:
    """Return up to ``cuts`` evenly spaced positions among ``count`` items, including both ends."""
    if count < cuts:
        return set(range(count + 1))
    return {round(number * count / (cuts - 1)) for number in range(cuts)}


def _compare(found: list[Any], expected: list[Any], what: str, first: int) -> None:
    for number, (left, right) in enumerate(zip_longest(found, expected, fillvalue=MISSING), first):
        if left is MISSING or right is MISSING or not same_items(left, right):
            raise AssertionError(f"{what}: item {number} should be {_describe(right)}, but is {_describe(left)}")


def _describe(item: Any) -> str:
    text = "none" if item is MISSING else repr(item)
    return text if len(text) <= 300 else f"{text[:300]}..."
