"""The stage contract: check the behavior of a stage on which loaders rely."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.loading.torchdata_patches.local_functions import pickled_stages
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.state.seeding import seed_stages
from wds_datapipes.seeds import SeedGenerator


def check_stage(make_pipe: Callable[[], IterDataPipe[Any]]) -> None:
    """Check that a stage fulfills the contract on which all loaders rely.

    Its ``__iter__`` is a generator function (otherwise, DataLoader2 hangs if it fails before its first item). It can be
    pickled before, during and after an iteration. It can be iterated again after a complete or an interrupted
    iteration and yields the same items with the same seed. It works in a worker process. Loaders find its sources, so
    that they can seed and shard them.

    Args:
        make_pipe: builds a new pipeline that ends in the stage and yields at least two items.

    Raises:
        AssertionError: the stage violates the contract; the message names the violation.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> check_stage(lambda: IterableWrapper([{"a": 1}, {"a": 2}]).to_tuple("a"))
    """
    pipe = make_pipe()
    name = type(pipe).__name__
    assert inspect.isgeneratorfunction(type(pipe).__iter__), f"{name}.__iter__ is not a generator function"
    expected = _items(pipe)
    assert len(expected) >= 2, f"{name} yields fewer than two items, which the check needs"
    assert same_items(_items(pipe), expected), f"{name} yields other items when it is iterated again"
    assert same_items(_items(make_pipe()), expected), f"{name} yields other items when it is built again"

    assert same_items(_items(pickle.loads(pickle.dumps(make_pipe()))), expected), f"{name} changes when it is pickled"
    started = _seed_pipeline(make_pipe())
    iterator = iter(started)
    next(iterator)
    pickle.dumps(started)  # raises if an attribute is an open file or a generator
    del iterator
    assert same_items(_items(started), expected), f"{name} yields other items after an interrupted iteration"
    assert same_items(_items(pickle.loads(pickle.dumps(started))), expected), (
        f"{name} changes when it is pickled after use"
    )

    loader = DataLoader(make_pipe(), batch_size=None, num_workers=1, generator=torch.Generator().manual_seed(0))
    received = list(loader)
    assert len(received) == len(expected), f"{name} yields {len(received)} of {len(expected)} items in a worker"

    found, known = ({id(each): each for each in some} for some in (pickled_stages(pipe), graph_of(pipe).stages))
    assert found == known, f"{name} stores its sources where loaders do not find them: {[*found.values()]}"


def same_items(left: Any, right: Any) -> bool:
    """Whether two items are equal, with arrays and tensors compared by type, shape and content."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same_items(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_items, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)


def _seed_pipeline(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    seed_stages(pipe, SeedGenerator(0))
    return pipe


def _items(pipe: IterDataPipe[Any]) -> list[Any]:
    return list(_seed_pipeline(pipe))
