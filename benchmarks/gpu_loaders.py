"""The loaders of bench_gpu.py, whose batches are on the GPU, or in page-locked memory.

Each function takes the URLs of shards, the number of workers, the number of samples in a batch, and the device. Those
that decode on the GPU are given the bytes of our pipeline, or read the shards themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import peer_loaders
import tar_loaders
import torch
from crops import SIZE, draw_cut
from tar_loaders import Batch
from torch import Tensor
from torch.utils.data import DataLoader
from training import PASSES

__all__ = ["LOADERS", "GpuLoader"]


def ours(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    return tar_loaders.ours(urls * PASSES, workers, batch=batch, pin_memory=device.type == "cuda")


def ours_not_pinned(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    del device
    return tar_loaders.ours(urls * PASSES, workers, batch=batch)


def dataloader(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    """Return our pipeline in PyTorch's ``DataLoader``, with a state."""
    from our_pipelines import decoded_as_batches

    from wds_datapipes import StatefulShards

    data = StatefulShards(decoded_as_batches(urls * PASSES, batch))
    return DataLoader(data, batch_size=None, num_workers=workers, pin_memory=device.type == "cuda")


def webdataset(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    return tar_loaders.webdataset(urls * PASSES, workers, batch=batch, pin_memory=device.type == "cuda")


def as_tensors(pair: tuple[bytes, int]) -> tuple[Tensor, int]:
    """Copy a JPEG file to a tensor, which travels in shared memory."""
    return torch.frombuffer(bytearray(pair[0]), dtype=torch.uint8), pair[1]


def torchvision(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterator[Batch]:
    """Our bytes, decoded by nvJPEG through torchvision, and resized on the GPU; a thread makes the next batch."""
    from our_pipelines import samples_of
    from torchdata.dataloader2 import DataLoader2
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2.functional import hflip, resized_crop

    from wds_datapipes import ShardReadingService

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

    with DataLoader2(pairs, reading_service=ShardReadingService(workers)) as loader, ThreadPoolExecutor(1) as thread:
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


def _dali(urls: list[str], workers: int, batch: int, device: torch.device, **options: Any) -> Iterator[Batch]:
    options = {"is_fused": False, "passes": PASSES, **options}
    index = device.index or 0 if device.type == "cuda" else None
    return peer_loaders.dali_batches(urls, workers, batch=batch, device_id=index, **options)


def dali_fed(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterator[Batch]:
    """Our bytes, decoded by DALI."""
    from our_pipelines import samples_of

    return _dali(urls, workers, batch, device, samples=samples_of(urls))


def dali(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterator[Batch]:
    """DALI with its own reader."""
    return _dali(urls, workers, batch, device)


def dali_fused(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterator[Batch]:
    """DALI with its own reader, which decodes only the crop."""
    return _dali(urls, workers, batch, device, is_fused=True)


class GpuLoader(NamedTuple):
    """A participant.

    Attributes:
        build: takes URLs, the number of workers, the number of samples in a batch, and the device; returns batches.
        workers: the numbers of worker processes to measure, or of threads in the case of DALI.
        has_same_boxes: it cuts the same boxes as the others.
    """

    build: Callable[[list[str], int, int, torch.device], Iterable[Batch]]
    workers: tuple[int, ...]
    has_same_boxes: bool = True


LOADERS = {
    "ours": GpuLoader(ours, (1, 2, 4, 8, 16)),
    "webdataset": GpuLoader(webdataset, (1, 2, 4, 8, 16)),
    "ours, DataLoader": GpuLoader(dataloader, (4, 8, 16)),
    "ours, torchvision decodes on the GPU": GpuLoader(torchvision, (1, 2)),
    "ours, not pinned": GpuLoader(ours_not_pinned, (16,)),
    "ours, DALI decodes on the GPU": GpuLoader(dali_fed, (1, 4, 8), has_same_boxes=False),
    "DALI on the GPU": GpuLoader(dali, (1, 4, 8), has_same_boxes=False),
    "DALI on the GPU, crop while decoding": GpuLoader(dali_fused, (8,), has_same_boxes=False),
}
