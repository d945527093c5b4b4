"""What ``DataLoader2`` lets a `ShardReadingService` know: the pipeline before it begins, and the number of an epoch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.reading.keeping import described
from wds_datapipes.reading.saved import KEY, checkpoints_in
from wds_datapipes.reading.service import ShardReadingService

__all__ = ["acquaint", "check_pipeline", "epoch_setter"]


def acquaint(loader: Any) -> None:
    """Tell the services of a loader which has not begun what its pipeline is, for the states that they save."""
    if not loader._adapted and loader.datapipe is not None:
        for service, _ in _services(loader.reading_service):
            service.know(loader.datapipe)


def check_pipeline(loader: Any, state: Mapping[str, Any]) -> None:
    """Make sure that the pipeline of a loader is the one that a state was saved with.

    Raises:
        StateError: it is another one.
    """
    own = state.get(KEY)
    if loader.datapipe is None or loader._adapted or own is None:
        return
    for service, state_of_service in _services(loader.reading_service, own):
        service.know(loader.datapipe)
        if state_of_service:
            for checkpoint in checkpoints_in(state_of_service):
                checkpoint.check(described(loader.datapipe))


def epoch_setter(loader: Any) -> Callable[[int], None]:
    """Return what chooses the number of the next epoch of a loader.

    Raises:
        AttributeError: its reading service cannot choose.
    """
    services = [service for service, _ in _services(loader.reading_service)]
    if not services:
        raise AttributeError(
            f"set_epoch needs a ShardReadingService, and the reading service here is {loader.reading_service!r}"
        )
    return services[0].set_epoch


def _services(service: Any, state: Any = None) -> Iterator[tuple[ShardReadingService, Any]]:
    """Yield each `ShardReadingService` of a loader, with its part of a state."""
    if isinstance(service, ShardReadingService):
        yield service, state
    elif within := getattr(service, "reading_services", None):
        states = [None] * len(within) if state is None else pickle.loads(state)  # noqa: S301 - as the service does itself
        if len(states) != len(within):
            raise StateError(f"The state is one of {len(states)} reading services in a row, and here are {len(within)}")
        for each, own in zip(within, states, strict=True):
            yield from _services(each, own)
