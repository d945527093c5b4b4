"""Resuming a pipeline from every position in another process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.graph._serialization import deserialize_datapipe, serialize_datapipe

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in
from wds_datapipes.loading.service.service import ShardReadingService
from wds_datapipes.testing.coverage import MISSING, describe_item

__all__ = ["rehearse_resume"]

Pipe = IterDataPipe[Any]
Same = Callable[[Any, Any], bool]

#: How long the other process may take for one cut, in seconds, before it counts as a hang.
LIMIT_S = 300.0


def rehearse_resume(make_pipeline: Callable[[], Pipe], *, workers: int, cuts: int, seed: int, same: Same) -> None:
    """Go on from many places of an epoch in another process, and compare what follows; see `testing.check_resume`."""

    def new() -> Any:
        loader = DataLoader2(make_pipeline(), reading_service=ShardReadingService(workers))
        loader.seed(seed)
        return loader

    with new() as loader:
        whole, after = list(loader), list(loader)
    with new() as loader:
        _compare(list(loader), whole, same, "The pipeline does not repeat itself with the same seed", 0)
    chosen = _spread(len(whole), cuts)
    outline: list[Any] | None = None
    with _elsewhere(make_pipeline(), workers) as ask, new() as loader:
        items = iter(loader)
        for cut in range(len(whole) + 1):
            if cut in chosen:
                place = f"After {cut} of {len(whole)} items"
                try:
                    state = loader.state_dict()
                except StateError as error:
                    raise AssertionError(f"{place}, there is no state: {error}") from error
                found = _outline(state)
                if outline is not None and not _fits(found, outline):
                    raise AssertionError(f"{place}, the state has the shape {found}, and had {outline} before")
                rest, following, again = ask(state, place)
                outline = _merge_outlines(outline, found)
                _compare(rest, whole[cut:], same, f"{place}, another process goes on with other items", cut)
                _compare(following, after, same, f"{place}, the epoch after the resumed one has other items", 0)
                if not _fits(again, outline):
                    raise AssertionError(
                        f"{place}, a state of the resumed run has the shape {again}, and one of the first run {outline}"
                    )
                outline = _merge_outlines(outline, again)
            if cut < len(whole):
                next(items)


def _spread(count: int, cuts: int) -> set[int]:
    """Return some cuts of so many items: the ends, and others at even distances; all if they are few enough."""
    if count < cuts:
        return set(range(count + 1))
    return {round(number * count / (cuts - 1)) for number in range(cuts)}


def _outline(state: Any) -> list[Any]:
    """Return what of a state is the same wherever it is saved: for each worker, the names in those of its stages."""
    (checkpoint,) = checkpoints_in(state)
    stages = [part.state for part in checkpoint.parts]
    return [None if each is None else [sorted(stage or ()) for stage in each] for each in stages]


def _fits(found: list[Any], outline: list[Any]) -> bool:
    """Whether two outlines agree, as far as both know their stages: a worker that has just begun has none yet."""
    return len(found) == len(outline) and all(
        left == right for left, right in zip(found, outline, strict=True) if None not in (left, right)
    )


def _merge_outlines(outline: list[Any] | None, found: list[Any]) -> list[Any]:
    """Return an outline with the stages that either of two knows."""
    if outline is None:
        return found
    return [right if left is None else left for left, right in zip(outline, found, strict=True)]


def _compare(found: list[Any], wanted: list[Any], same: Same, what: str, first: int) -> None:
    for number, (left, right) in enumerate(zip_longest(found, wanted, fillvalue=MISSING), first):
        if left is MISSING or right is MISSING or not same(left, right):
            raise AssertionError(
                f"{what}: item {number} has to be {describe_item(right)}, and is {describe_item(left)}"
            )


@contextmanager
def _elsewhere(pipe: Pipe, workers: int) -> Iterator[Callable[[dict[str, Any], str], tuple[list[Any], list[Any], Any]]]:
    """Start a process with a new interpreter that resumes a pipeline from states; yield what asks it to."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_go_on, args=(far, serialize_datapipe(pipe), workers))
    process.start()
    far.close()

    def ask(state: dict[str, Any], place: str) -> tuple[list[Any], list[Any], Any]:
        try:
            near.send_bytes(pickle.dumps(state))
            if not near.poll(LIMIT_S):
                raise AssertionError(f"{place}, another process does not go on within {LIMIT_S:g} seconds")
            answer = pickle.loads(near.recv_bytes())
        except (EOFError, ConnectionError):
            process.join()
            raise AssertionError(f"{place}, the process that goes on ends with code {process.exitcode}") from None
        if isinstance(answer, str):
            raise AssertionError(f"{place}, another process cannot go on: {answer}")
        rest, following, again = answer
        return rest, following, again

    try:
        yield ask
    finally:
        near.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _go_on(connection: Connection, pipe: bytes, workers: int) -> None:
    """Go on from each state that comes; answer with the rest, the epoch after it, and a state after the first item."""
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            state = pickle.loads(data)
            with DataLoader2(deserialize_datapipe(pipe), reading_service=ShardReadingService(workers)) as loader:
                loader.load_state_dict(state)
                items = iter(loader)
                first = next(items, MISSING)
                again = _outline(loader.state_dict())
                rest = [*([] if first is MISSING else [first]), *items]
                answer = pickle.dumps((rest, list(loader), again))
        except Exception as error:  # noqa: BLE001 - it is not lost: the other process raises it
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        connection.send_bytes(answer)
