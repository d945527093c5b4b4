"""The loaders of bench_end_to_end.py that read shards with PyTorch: ours, webdataset, torchdata and Hugging Face.

Each function takes the URLs of shards and a number of worker processes (0: the training process), and returns an
iterable of batches in the training process: 64 x 3 x 224 x 224 bytes, and 64 labels. Packages are imported on use,
since each loader runs in a process, and some in an environment, of its own.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from crops import SIZE, random_resized_crop
from PIL import Image
from torch.utils.data import DataLoader

__all__ = [
    "BATCH",
    "Batch",
    "crop_pair",
    "dataloader",
    "hugging_face",
    "import_package",
    "ours",
    "ours_scaled",
    "ours_with_pillow",
    "torchdata",
    "webdataset",
]

#: The number of samples in a batch.
BATCH = 64

FOLDER = Path(__file__).resolve().parent

Batch = tuple[torch.Tensor, torch.Tensor]


def import_package(name: str) -> ModuleType:
    """Import a package. A module of this folder hides the package ``datasets``."""
    loaded = sys.modules.get(name)
    if name != "datasets" or (loaded is not None and Path(loaded.__file__ or "").parent != FOLDER):
        return importlib.import_module(name)
    sys.modules.pop(name, None)
    path, sys.path = sys.path, [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    try:
        return importlib.import_module(name)
    finally:
        sys.path = path


def crop_pair(pair: tuple[Image.Image, int]) -> tuple[torch.Tensor, int]:
    return random_resized_crop(pair[0]), pair[1]


def ours(urls: list[str], workers: int, *, batch: int = BATCH, pin_memory: bool = False) -> Iterable[Batch]:
    """Return our pipeline, which crops while decoding, in ``DataLoader2`` with our reading service."""
    from our_pipelines import decoded_as_batches

    return _in_our_service(decoded_as_batches(urls, batch), workers, pin_memory=pin_memory)


def ours_scaled(urls: list[str], workers: int) -> Iterable[Batch]:
    """Like `ours`, decoding at the smallest scale that has the pixels of the crop."""
    from our_pipelines import decoded_as_batches

    return _in_our_service(decoded_as_batches(urls, min_size=SIZE), workers)


def ours_with_pillow(urls: list[str], workers: int) -> Iterable[Batch]:
    """Like `ours`, decoding, cropping and collating with the code of the others."""
    from our_pipelines import cropped_by_pillow

    return _in_our_service(cropped_by_pillow(urls), workers)


def _in_our_service(batches: Any, workers: int, *, pin_memory: bool = False) -> Iterable[Batch]:
    from torchdata.dataloader2 import DataLoader2

    from wds_datapipes import ShardReadingService

    loader: Iterable[Batch] = DataLoader2(batches, reading_service=ShardReadingService(workers, pin_memory=pin_memory))
    return loader


def dataloader(urls: list[str], workers: int) -> Iterable[Batch]:
    """Return our pipeline in PyTorch's ``DataLoader``."""
    from our_pipelines import decoded_as_batches

    return DataLoader(decoded_as_batches(urls), batch_size=None, num_workers=workers)


def webdataset(urls: list[str], workers: int, *, batch: int = BATCH, pin_memory: bool = False) -> Iterable[Batch]:
    """Return the pipeline of webdataset in its ``WebLoader``, which reads from S3 through a command."""
    import webdataset as wds
    from webdataset.tariterators import tarfile_to_samples

    urls = [re.sub("^s3://", "pipe:rclone cat :s3:", url) for url in urls]
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.split_by_worker,
        tarfile_to_samples(),
        wds.decode("pil"),
        wds.to_tuple("jpg", "cls"),
        wds.map(crop_pair),
        wds.batched(batch),
    )
    loader: Iterable[Batch] = wds.WebLoader(pipeline, batch_size=None, num_workers=workers, pin_memory=pin_memory)
    return loader


def decode_streams(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    image = Image.open(io.BytesIO(sample[".jpg"].read()))
    return random_resized_crop(image), int(sample[".cls"].read())


def torchdata(urls: list[str], workers: int) -> Iterable[Batch]:
    """Return the stages of torchdata in its own reading service, without our patches."""
    import torchdata.datapipes.iter as pipes
    from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

    shards = pipes.IterableWrapper(urls).sharding_filter()
    files = pipes.FSSpecFileOpener(shards, mode="rb") if "://" in urls[0] else pipes.FileOpener(shards, mode="b")
    samples = files.load_from_tar(mode="r:").webdataset()
    batches = samples.map(decode_streams).batch(BATCH).collate()
    loader: Iterable[Batch] = DataLoader2(batches, reading_service=MultiProcessingReadingService(workers))
    return loader


def crop_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": random_resized_crop(row["jpg"]), "label": int(row["cls"])}


def stack_rows(rows: list[dict[str, Any]]) -> Batch:
    return torch.stack([row["image"] for row in rows]), torch.tensor([row["label"] for row in rows])


def hugging_face(urls: list[str], workers: int) -> Iterable[Batch]:
    """Return a stream of Hugging Face datasets in PyTorch's ``DataLoader``."""
    datasets = import_package("datasets")
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True)
    pairs = rows.map(crop_row, remove_columns=["__key__", "__url__", "jpg", "cls"])
    return DataLoader(pairs, batch_size=BATCH, num_workers=workers, collate_fn=stack_rows)
