"""Our pipelines for bench_end_to_end.py, from shards to batches. Importing this patches torchdata."""

from __future__ import annotations

from random import Random
from typing import Any

from crops import SIZE, draw_cut
from tar_loaders import BATCH, crop_pair

from wds_datapipes import ImageDecoder, ShardList
from wds_datapipes.codecs.crops import Box, Crop

__all__ = ["SameCut", "cropped_by_pillow", "decoded_as_batches", "samples_of"]


class SameCut(Crop):
    """A random resized crop to the boxes of crops.py."""

    def select(self, width: int, height: int, rng: Random) -> Box:  # noqa: ARG002 - the interface of crops
        """Return the box of an image of this size."""
        return Box(*draw_cut(width, height))


def samples_of(urls: list[str]) -> Any:
    return ShardList(urls).sharding_filter().load_wds_shards().group_samples()


def decoded_as_batches(urls: list[str], batch: int = BATCH, *, min_size: int | None = None) -> Any:
    """Crop while decoding, into one tensor."""
    decoder = ImageDecoder("torchrgb8", crop=SameCut(SIZE), min_size=min_size)
    return samples_of(urls).batch(batch).decode_batch(decoder).to_tuple("jpg", "cls")


def cropped_by_pillow(urls: list[str]) -> Any:
    """Decode to Pillow images, and crop them as torchvision does."""
    return samples_of(urls).wds_decode("pil").to_tuple("jpg", "cls").map(crop_pair).batch(BATCH).collate()
