"""What all loaders of images have in common: their settings, their batches, and their methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from wds_datapipes import CenterCrop, ImageDecoder, RandomResizedCrop


class Settings(NamedTuple):
    """How to load images."""

    #: The folder of the images, or the folder or URL of the shards.
    data: str
    #: Samples in a global batch, over all ranks.
    batch_size: int
    #: Worker processes of each rank.
    workers: int
    #: Height and width of the images, in pixels.
    size: int
    seed: int

    @property
    def rank_batch_size(self) -> int:
        """The number of samples that a rank gets in a step."""
        return self.batch_size // dist.get_world_size()

    def decoder(self, split: str) -> ImageDecoder:
        """Return the decoder with the usual augmentation, or for validation without any."""
        if split == "train":
            return ImageDecoder("torchrgb8", crop=RandomResizedCrop(self.size, flip_probability=0.5))
        return ImageDecoder("torchrgb8", crop=CenterCrop(self.size, resize=self.size * 256 // 224))


class Batch(NamedTuple):
    """What a rank gets in a step."""

    keys: list[str]
    #: Bytes (B, 3, H, W). They become floats on the device.
    images: torch.Tensor
    labels: torch.Tensor
    #: Whether a sample only fills up the batch, and counts nowhere.
    is_padding: torch.Tensor


class Loader(Protocol):
    """What the training loop needs of a loader. All ranks call its methods together."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank: for training, equally many on all ranks."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch. A loaded state continues if its epoch is this one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""

    def shutdown(self) -> None:
        """End the workers."""
