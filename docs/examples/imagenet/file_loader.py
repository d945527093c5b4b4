"""Load images from files, in one folder per class, as torchvision unpacks ImageNet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from batches import Batch, Settings
from torch.utils.data import DataLoader, Dataset

from wds_datapipes import ImageDecoder

ENDINGS = {".jpeg", ".jpg", ".png"}
#: The number of an image, the seed of its crop, and whether it is padding.
Request: TypeAlias = "tuple[int, str, bool]"
#: The key of an image, its pixels, its class, and whether it is padding.
Item: TypeAlias = "tuple[str, torch.Tensor, int, bool]"


class ImageFiles(Dataset[Item]):
    """The images of ``root/split/CLASS``. The folders of ``root/train`` are the classes, in alphabetical order."""

    def __init__(self, root: str, split: str, decoder: ImageDecoder) -> None:
        classes = sorted(folder.name for folder in Path(root, "train").iterdir() if folder.is_dir())
        self.images = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted(Path(root, split, name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not self.images:
            raise FileNotFoundError(f"There are no images in {root}/{split}, in one folder per class of {root}/train")
        self._decoder = decoder

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, request: Request) -> Item:
        number, seed, is_padding = request
        path, label = self.images[number]
        image = self._decoder.with_rng(lambda: Random(seed)).decode(path.read_bytes())
        return path.stem, image, label, is_padding


class DummyImages(Dataset[Item]):
    """Images of noise, to measure the training without data."""

    def __init__(self, length: int, size: int, num_classes: int) -> None:
        self._length, self._size, self._num_classes = length, size, num_classes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, request: Request) -> Item:
        number, _, is_padding = request
        rng = torch.Generator().manual_seed(number)
        image = torch.randint(256, (3, self._size, self._size), dtype=torch.uint8, generator=rng)
        return str(number), image, number % self._num_classes, is_padding


class FileLoader:
    """Loads a map-style dataset with PyTorch's ``DataLoader``, and counts what the loop has received.

    The global batches of an epoch depend only on the seed and the epoch, so its state fits any number of ranks. The
    last batch is padded; without ``shuffle``, each rank reads every n-th image, and nothing is padded.
    """

    def __init__(self, dataset: ImageFiles | DummyImages, settings: Settings, *, shuffle: bool) -> None:
        self._length, self._settings, self._shuffle = len(dataset), settings, shuffle
        self._epoch = self._received = 0
        self._loader: DataLoader[Item] = DataLoader(
            dataset,
            batch_sampler=_Requests(self),
            num_workers=settings.workers,
            persistent_workers=settings.workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._received += self._settings.batch_size
            yield Batch(*batch)
        self._epoch, self._received = self._epoch + 1, 0

    def requests(self) -> Iterator[list[Request]]:
        """Yield the batches of this rank in the rest of the epoch."""
        length, size, own_size = self._length, self._settings.batch_size, self._settings.rank_batch_size
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if not self._shuffle:
            own = range(rank, length, ranks)
            yield from ([(n, "", False) for n in own[i : i + own_size]] for i in range(0, len(own), own_size))
            return
        epoch_seed = f"{self._settings.seed} {self._epoch}"
        order = list(range(length))
        Random(epoch_seed).shuffle(order)
        for start in range(self._received, length, size):
            places = range(start + rank * own_size, start + (rank + 1) * own_size)
            numbers = [(order[place % length], place >= length) for place in places]
            yield [(number, f"{epoch_seed} {number}", is_padding) for number, is_padding in numbers]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        if epoch != self._epoch:
            self._epoch, self._received = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of samples that all ranks have received in it."""
        return {"epoch": self._epoch, "received": self._received, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were received."""
        if state["length"] != self._length:
            raise ValueError(f"The state was saved with {state['length']} images, but the dataset has {self._length}")
        self._epoch, self._received = state["epoch"], state["received"]

    def shutdown(self) -> None:
        """End the workers."""
        del self._loader


class _Requests:
    """The batch sampler of a `FileLoader`."""

    def __init__(self, loader: FileLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Request]]:
        return self._loader.requests()
