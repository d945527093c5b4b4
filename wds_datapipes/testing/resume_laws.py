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
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in
from wds_datapipes.loading.service.service import ShardReadingService
from wds_datapipes.loading.torchdata_api import DataLoader2, deserialize_datapipe, serialize_datapipe
from wds_datapipes.testing.coverage import MISSING, describe_item

__all__ = ["compare_resumed_runs"]

Pipe = IterDataPipe[Any]
Same = Callable[[Any, Any], bool]

#: The timeout of the other process for one cut, in seconds.
LIMIT_S = 300.0


def compare_resumed_runs(make_pipeline: Callable[[], Pipe], *, workers: int, cuts: int, seed: int, same: Same) -> None:
    """Resume from several positions of an epoch in another process, and compare; see `testing.check_resume`."""

    def new_loader() -> Any:
        loader = DataLoader2(make_pipeline(), reading_service=ShardReadingService(workers))
        loader.seed(seed)
        return loader

    with new_loader() as loader:
        whole, after = list(loader), list(loader)
    with new_loader() as loader:
        _compare(list(loader), whole, same, "The pipeline is not reproducible with the same seed", 0)
    chosen = _spread(len(whole), cuts)
    structure: list[Any] | None = None
    with _other_process(make_pipeline(), workers) as resume, new_loader() as loader:
        items = iter(loader)
        for cut in range(len(whole) + 1):
            if cut in chosen:
                position = f"After {cut} of {len(whole)} items"
                try:
                    state = loader.state_dict()
                except StateError as error:
                    raise AssertionError(f"{position}, there is no state: {error}") from error
                found = _structure(state)
                if structure is not None and not _fits(found, structure):
                    raise AssertionError(f"{position}, the state has the structure {found}, not {structure} as before")
                rest, following, again = resume(state, position)
                structure = _merge_structures(structure, found)
                _compare(rest, whole[cut:], same, f"{position}, another process resumes with other items", cut)
                _compare(following, after, same, f"{position}, the epoch after the resumed one has other items", 0)
                if not _fits(again, structure):
                    raise AssertionError(
                        f"{position}, a state of the resumed run has the structure {again}, not {structure} as in the "
                        f"first run"
                    )
                structure = _merge_structures(structure, again)
            if cut < len(whole):
                next(items)


def _spread(count: int, cuts: int) -> set[int]:
    """Return up to ``cuts`` evenly spaced positions among ``count`` items, including both ends."""
    if count < cuts:
        return set(range(count + 1))
    return {round(number * count / (cuts - 1)) for number in range(cuts)}


def _structure(state: Any) -> list[Any]:
    """Return the names in the states of each worker's stages, which do not depend on the position."""
    (checkpoint,) = checkpoints_in(state)
    stages = [part.stages for part in checkpoint.parts]
    return [None if each is None else [sorted(stage or ()) for stage in each] for each in stages]


def _fits(found: list[Any], structure: list[Any]) -> bool:
    """Whether two structures agree in the stages that both have; a worker that has just started has none."""
    return len(found) == len(structure) and all(
        left == right for left, right in zip(found, structure, strict=True) if None not in (left, right)
    )


def _merge_structures(structure: list[Any] | None, found: list[Any]) -> list[Any]:
    """Return a structure with the stages that either of two has."""
    if structure is None:
        return found
    return [right if left is None else left for left, right in zip(structure, found, strict=True)]


def _compare(found: list[Any], expected: list[Any], same: Same, what: str, first: int) -> None:
    for number, (left, right) in enumerate(zip_longest(found, expected, fillvalue=MISSING), first):
        if left is MISSING or right is MISSING or not same(left, right):
            raise AssertionError(
                f"{what}: item {number} should be {describe_item(right)}, but is {describe_item(left)}"
            )


@contextmanager
def _other_process(
    pipe: Pipe, workers: int
) -> Iterator[Callable[[dict[str, Any], str], tuple[list[Any], list[Any], Any]]]:
    """Start a new interpreter that resumes a pipeline from states; yield a function that sends it a state."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, serialize_datapipe(pipe), workers))
    process.start()
    far.close()

    def resume(state: dict[str, Any], position: str) -> tuple[list[Any], list[Any], Any]:
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
        rest, following, again = answer
        return rest, following, again

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
    """Resume from each received state; send the rest of the epoch, the next epoch, and a state after the first item."""
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
                again = _structure(loader.state_dict())
                rest = [*([] if first is MISSING else [first]), *items]
                answer = pickle.dumps((rest, list(loader), again))
        except Exception as error:  # noqa: BLE001  the other process raises it
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        connection.send_bytes(answer)
