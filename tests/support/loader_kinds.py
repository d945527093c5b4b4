"""The kinds of loaders, and the law of states: a resumed run yields the rest of the epoch, and the next one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from wds_datapipes import StatefulShards
from wds_datapipes.errors import StateError

if TYPE_CHECKING:
    from pipeline_table import Build

#: Why tests of this loader do not run with Python 3.13; no other test is ever skipped.
NO_STATEFUL_LOADER = "torchdata 0.7.1, which newer Pythons get, has no StatefulDataLoader"
SEED = 8


class Service:
    """A `DataLoader2` with a `ShardReadingService`."""

    @staticmethod
    def service() -> Any:
        """Return the class of the service."""
        from wds_datapipes import ShardReadingService

        return ShardReadingService

    def __init__(self, build: Build, workers: int, state: Any = None, seed: int | None = SEED, **options: Any) -> None:
        from torchdata.dataloader2 import DataLoader2  # which releases with nodes lack

        self.loader: Any = DataLoader2(build(), reading_service=self.service()(workers, **options))
        if seed is not None:
            self.loader.seed(seed)
        if state is not None:
            self.loader.load_state_dict(state)

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.loader.state_dict()))

    def close(self) -> None:
        self.loader.shutdown()


class Tracked:
    """A `StatefulShards` with torch's ``DataLoader``."""

    kind: Any = DataLoader

    def __init__(
        self,
        build: Build,
        workers: int,
        state: Any = None,
        distributed: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        self.data = StatefulShards(build(), seed=SEED, distributed=distributed)
        options |= {"batch_size": batch_size, "num_workers": workers}
        options["multiprocessing_context"] = "fork" if workers else None
        self.loader = self.kind(self.data, collate_fn=unchanged if batch_size is None else list, **options)
        if state is not None:
            self.load(state)

    def load(self, state: Any) -> None:
        self.data.load_state_dict(state)

    def epoch(self) -> Any:
        return self.data.tracked(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.data.state_dict()))

    def close(self) -> None:
        self.loader._iterator = None


class Persistent(Tracked):
    """The same, with workers that persist across epochs."""

    def __init__(self, build: Build, workers: int, state: Any = None, **options: Any) -> None:
        super().__init__(build, workers, state, persistent_workers=True, **options)


class InStateful(Tracked):
    """A `StatefulShards` with a ``StatefulDataLoader``, whose loop is tracked."""

    @staticmethod
    def kind(*arguments: Any, **options: Any) -> Any:
        module = pytest.importorskip("torchdata.stateful_dataloader", reason=NO_STATEFUL_LOADER)
        return module.StatefulDataLoader(*arguments, **options)


class Stateful(InStateful):
    """A ``StatefulDataLoader`` that saves and loads its own states."""

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def epoch(self) -> Any:
        return iter(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.loader.state_dict()))


class Nodes:
    """A `PipelineNode` in a ``torchdata.nodes.Loader``, which needs a release of torchdata without ``DataLoader2``."""

    def __init__(self, build: Build, workers: int, state: Any = None, **options: Any) -> None:
        from torchdata.nodes import Loader

        from wds_datapipes.integrations.nodes import PipelineNode

        self.node = PipelineNode(build(), seed=SEED, num_workers=workers, **options)
        self.loader: Any = Loader(self.node)
        if state is not None and "root" in state:
            self.loader.load_state_dict(state)
        elif state is not None:
            self.node.data.load_state_dict(state)

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.loader.state_dict()))

    def close(self) -> None:
        del self.loader


def unchanged(item: Any) -> Any:
    """Keep tuples, which torch would turn into lists."""
    return item


def comparable(item: Any) -> Any:
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.tolist()
    if isinstance(item, dict):
        return {key: comparable(value) for key, value in item.items()}
    return [comparable(each) for each in item] if isinstance(item, list | tuple) else item


def items_of(items: Iterator[Any], count: int | None = None) -> list[Any]:
    return [comparable(item) for item in itertools.islice(items, count)]


def is_replayed(state: Any) -> bool:
    return '"replayed' in json.dumps(state).replace("\\", "")


def check_law(new: Callable[..., Any], *, cuts: int) -> str:
    """Check the law; return how the pipeline resumed, or why it has no state.

    Args:
        new: creates a loader, from a state if one is given.
        cuts: the number of states to save, evenly spaced from the beginning of the second epoch to its end.
    """
    states, second = list[Any](), list[Any]()
    with closing(new()) as run:
        items_of(run.epoch())
        try:
            states.append(run.state())
            for item in run.epoch():
                second.append(comparable(item))
                states.append(run.state())
        except StateError as error:
            return str(error)
        end, third = run.state(), items_of(run.epoch())
    size = len(second)
    assert size > 1
    for turn, cut in enumerate(sorted({round(number * size / (cuts - 1)) for number in range(cuts)})):
        with closing(new(states[cut])) as run:
            items = run.epoch()
            head = items_of(items, turn % 3)
            # A state of the resumed run is equivalent.
            again, is_over = run.state() if head else states[cut], len(head) < turn % 3
            assert head + items_of(items) == second[cut:], f"after {cut} of {size} items"
            assert items_of(run.epoch()) == third, f"in the epoch after one resumed after {cut} items"
        if turn == cuts // 2:
            with closing(new(again)) as run:
                assert items_of(run.epoch()) == (third if is_over else second[cut + len(head) :])
    with closing(new(end)) as run:
        assert items_of(run.epoch()) == third
    return "replay" if is_replayed(states[1]) else "exact"


Batches = partial(Tracked, batch_size=2, drop_last=True)
