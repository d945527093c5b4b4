"""Our loaders, which keep the contract of table.py. Importing this patches torchdata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch
from harness.crops import BATCH, PASSES, SIZE, Batch, crop_pair, draw_cut
from torch import Tensor
from torch.utils.data import DataLoader

from loaders.tar import Source
from wds_datapipes import ImageDecoder, IndexedSamples, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.codecs.crops import Box, Crop
from wds_datapipes.index import AccessOptions, Manifest, build_indexes

__all__ = [
    "batches",
    "batches_by_pillow",
    "batches_of_dataloader",
    "batches_of_min_size",
    "decoded_by_dali",
    "decoded_by_torchvision",
    "indexed_images",
    "not_pinned",
    "pinned",
    "pinned_by_dataloader",
    "streamed_images",
]


class SameCut(Crop):
    """A random resized crop to the boxes of crops.py."""

    def select(self, width: int, height: int, rng: Random) -> Box:  # noqa: ARG002 - the interface of crops
        """Return the box of an image of this size."""
        return Box(*draw_cut(width, height))


def samples_of(urls: list[str]) -> Any:
    return ShardList(urls).sharding_filter().load_wds_shards().group_samples()


def crops_of(urls: list[str], batch: int = BATCH, *, min_size: int | None = None) -> Any:
    """Crop while decoding, into one tensor."""
    decoder = ImageDecoder("torchrgb8", crop=SameCut(SIZE), min_size=min_size)
    return samples_of(urls).batch(batch).decode_batch(decoder).to_tuple("jpg", "cls")


def in_our_service(pipe: Any, workers: int, *, pin_memory: bool = False) -> Iterable[Any]:
    from torchdata.dataloader2 import DataLoader2

    loader: Iterable[Any] = DataLoader2(pipe, reading_service=ShardReadingService(workers, pin_memory=pin_memory))
    return loader


def batches(urls: list[str], workers: int) -> Iterable[Batch]:
    """Return batches that are cropped while decoding, in ``DataLoader2`` with our reading service."""
    return in_our_service(crops_of(urls), workers)


def batches_of_min_size(urls: list[str], workers: int) -> Iterable[Batch]:
    """Like `batches`, decoding at the smallest scale that has the pixels of the crop."""
    return in_our_service(crops_of(urls, min_size=SIZE), workers)


def batches_by_pillow(urls: list[str], workers: int) -> Iterable[Batch]:
    """Like `batches`, decoding, cropping and collating with the code of the others."""
    pairs = samples_of(urls).wds_decode("pil").to_tuple("jpg", "cls").map(crop_pair)
    return in_our_service(pairs.batch(BATCH).collate(), workers)


def batches_of_dataloader(urls: list[str], workers: int) -> Iterable[Batch]:
    """Like `batches`, in PyTorch's ``DataLoader``."""
    return DataLoader(crops_of(urls), batch_size=None, num_workers=workers)


def pinned(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    return in_our_service(crops_of(urls * PASSES, batch), workers, pin_memory=device.type == "cuda")


def not_pinned(urls: list[str], workers: int, batch: int, _device: torch.device) -> Iterable[Batch]:
    return in_our_service(crops_of(urls * PASSES, batch), workers)


def pinned_by_dataloader(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    """Return our pipeline in PyTorch's ``DataLoader``, with a state."""
    data = StatefulShards(crops_of(urls * PASSES, batch))
    return DataLoader(data, batch_size=None, num_workers=workers, pin_memory=device.type == "cuda")


def as_tensors(pair: tuple[bytes, int]) -> tuple[Tensor, int]:
    """Copy a JPEG file to a tensor, which travels in shared memory."""
    return torch.frombuffer(bytearray(pair[0]), dtype=torch.uint8), pair[1]


def decoded_by_torchvision(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterator[Batch]:
    """Our bytes, decoded by nvJPEG through torchvision, and resized on the GPU; a thread makes the next batch."""
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2.functional import hflip, resized_crop

    pairs = samples_of(urls * PASSES).wds_decode(only="cls").to_tuple("jpg", "cls").map(as_tensors).batch(batch)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def cut(image: Tensor) -> Tensor:
        box = draw_cut(image.shape[2], image.shape[1])
        image = resized_crop(image, box.top, box.left, box.height, box.width, [SIZE, SIZE], antialias=True)
        return hflip(image) if box.is_mirrored else image

    def decode(samples: Iterator[list[tuple[Tensor, int]]]) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        with torch.cuda.stream(stream):
            jpegs, labels = zip(*next(samples), strict=True)
            images = torch.stack([cut(image) for image in decode_jpeg(list(jpegs), device=device)])
            return images, torch.tensor(labels, device=device), stream.record_event() if stream else None

    loader: Any = in_our_service(pairs, workers)
    with loader, ThreadPoolExecutor(1) as thread:
        samples = iter(loader)
        coming = thread.submit(decode, samples)
        while True:
            images, labels, event = coming.result()
            coming = thread.submit(decode, samples)
            if event is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                images.record_stream(current)
                labels.record_stream(current)
            yield images, labels


def decoded_by_dali(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    """Our bytes, decoded by DALI."""
    from loaders.peers import dali_on_gpu

    return dali_on_gpu(urls, workers, batch, device, samples=samples_of(urls))


def streamed_images(source: Source) -> Iterator[bytes]:
    ahead = {} if source.read_ahead is None else {"read_ahead": source.read_ahead}
    return (sample["jpg"] for sample in ShardList(source.urls).load_wds_shards(**ahead).group_samples())


def indexed_images(source: Source) -> Iterator[bytes]:
    """Yield images in shuffled windows."""
    manifest = Manifest(build_indexes(source.urls, index_dir=source.indexes))
    ahead: dict[str, Any] = {} if source.read_ahead is None else {"read_ahead": source.read_ahead}
    access = AccessOptions(index_dir=source.indexes, **ahead)
    return (sample["jpg"] for sample in IndexedSamples(manifest, access=access))
