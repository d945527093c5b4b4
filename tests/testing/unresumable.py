"""Stages for `test_rehearsal` that break the rules, in a module that another process can import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

from wds_datapipes import Stage

Pipe = IterDataPipe[Any]


class Buffered(Stage[Any]):
    """Holds back an item, but declares that it does not."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        held = None
        for item in self.source:
            if held is not None:
                yield held
            held = item
        if held is not None:
            yield held


class Ending(Stage[Any]):
    """Exits or fails in the process that resumes."""

    is_stateless = True

    def __init__(self, source: Pipe, how: str) -> None:
        self.source = source
        self.how = how

    def __getstate__(self) -> Any:
        return {"source": self.source, "how": self.how}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        if multiprocessing.parent_process() is not None:
            if self.how == "exit":
                os._exit(7)
            raise LookupError("not here")

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def unrepeatable(sample: dict[str, Any]) -> Any:
    return torch.randint(1 << 40, (), generator=torch.Generator().manual_seed(torch.Generator().seed()))


class SelfSeeded(IterDataPipe[Any]):
    """Shuffles in a different order in each process."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        items = list(self.source)
        for index in torch.randperm(len(items), generator=torch.Generator().manual_seed(torch.Generator().seed())):
            yield items[int(index)]


class Lossy(IterDataPipe[Any]):
    """Drops the first sample of each share in every epoch but the first."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        items = iter(self.source)
        if self.epochs > 1:
            next(items, None)
        yield from items


def unrepeatable_with_key(sample: dict[str, Any]) -> Any:
    return sample["__key__"], int(unrepeatable(sample))
