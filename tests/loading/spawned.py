"""Spawned workers; a script, because their classes must be found in a module that a new interpreter can import."""

import re
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.loading.torchdata_patches import patches

patches.apply()

from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService  # noqa: E402 - after the patches


class Source(IterDataPipe[Any]):
    """Yields 1 and 2 numbers in two workers, twice; then an item that cannot be pickled."""

    def __init__(self) -> None:
        self.epoch = self.worker = 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        self.worker = instance_id

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        if self.epoch == 3:
            yield {"meta": threading.Lock()}
        for number in range(1 + self.worker):
            yield self.worker * 1000 + number


class Fragile(Source):
    """Can be pickled, and cannot be unpickled in a worker."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if threading.current_thread().name != "MainThread" or __name__ == "__mp_main__":
            raise LookupError("not in a worker")
        self.__dict__.update(state)


def loader(source: Source) -> DataLoader2[Any]:
    return DataLoader2(source, reading_service=MultiProcessingReadingService(2, "spawn"))


def print_match(error: Exception, pattern: str) -> None:
    found = re.search(pattern, str(error))
    print(f"{type(error).__name__}: {found[0] if found else error}")


if __name__ == "__main__":
    with loader(Source()) as dl:
        print("epochs:", list(dl), list(dl))
        try:
            list(dl)
        except Exception as error:
            print_match(error, r"part 'meta' is an object of type _thread\.lock")
    with loader(Fragile()) as dl:
        try:
            list(dl)
        except Exception as error:
            print_match(error, "ended with exit code 1")
