"""Resume check: resumes a pipeline from several positions in another process, and compares the items."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.extras import require
from wds_datapipes.testing.coverage import MISSING, describe_item
from wds_datapipes.testing.stage_contract import same_items

Pipe = IterDataPipe[Any]
Resumed = tuple[list[Any], list[Any]]

#: The timeout of the other process for one cut, in seconds.
LIMIT_S = 300.0


def check_resume(
    make_pipeline: Callable[[], IterDataPipe[Any]], *, workers: int = 0, cuts: int = 20, seed: int = 0
) -> None:
    """Check that a pipeline resumes exactly from a saved state.

    A state is saved at several positions of an epoch, and each state is loaded in a new interpreter. The items that
    follow there, and those of the next epoch, must be the same as here. The
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
    from wds_datapipes.loading.torchdata_api import serialize_datapipe

    with _loader(make_pipeline(), workers, seed) as loader:
        whole, after = list(loader), list(loader)
    with _loader(make_pipeline(), workers, seed) as loader:
        _compare(list(loader), whole, "The pipeline is not reproducible with the same seed", 0)
    chosen = _spread(len(whole), cuts)
    copied = serialize_datapipe(make_pipeline())
    with _other_process(copied, workers) as resume, _loader(make_pipeline(), workers, seed) as loader:
        items = iter(loader)
        for cut in range(len(whole) + 1):
            if cut in chosen:
                position = f"After {cut} of {len(whole)} items"
                try:
                    state = loader.state_dict()
                except StateError as error:
                    raise AssertionError(f"{position}, there is no state: {error}") from error
                rest, following = resume(state, position)
                _compare(rest, whole[cut:], f"{position}, another process resumes with other items", cut)
                _compare(following, after, f"{position}, the epoch after the resumed one has other items", 0)
            if cut < len(whole):
                next(items)


def _loader(pipe: Pipe, workers: int, seed: int | None = None) -> Any:
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
            raise AssertionError(
                f"{what}: item {number} should be {describe_item(right)}, but is {describe_item(left)}"
            )


@contextmanager
def _other_process(pipe: bytes, workers: int) -> Iterator[Callable[[dict[str, Any], str], Resumed]]:
    """Start a new interpreter that resumes a pipeline from states; yield a function that sends it a state."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, pipe, workers))
    process.start()
    far.close()

    def resume(state: dict[str, Any], position: str) -> Resumed:
        try:
            near.send_bytes(pickle.dumps(state))
            if not near.poll(LIMIT_S):
                raise AssertionError(f"{position}, the other process did not respond within {LIMIT_S:g} seconds")
            answer = pickle.loads(near.recv_bytes())
        except (EOFError, ConnectionError):
            process.join()
            raise AssertionError(f"{position}, the other process ended with code {process.exitcode}") from None
        if isinstance(answer, str):
            raise AssertionError(f"{position}, another process cannot resume: {answer}")
        rest, following = answer
        return rest, following

    try:
        yield resume
    finally:
        near.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _serve(connection: Connection, pipe: bytes, workers: int) -> None:
    """Resume from each received state; send the rest of the epoch, and the next epoch."""
    from wds_datapipes.loading.torchdata_api import deserialize_datapipe

    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            with _loader(deserialize_datapipe(pipe), workers) as loader:
                loader.load_state_dict(pickle.loads(data))
                answer = pickle.dumps((list(loader), list(loader)))
        except Exception as error:  # noqa: BLE001  the other process raises it
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        connection.send_bytes(answer)
