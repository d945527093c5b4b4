"""The loaders of other packages that read shards in Python: webdataset, torchdata, Hugging Face and clients of S3.

They keep the contract of table.py. Packages are imported on use, since each loader runs in a process, and some in an
environment, of its own.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from harness.crops import BATCH, PASSES, Batch, crop_pair, random_resized_crop
from PIL import Image
from torch.utils.data import DataLoader

__all__ = [
    "Source",
    "hugging_face",
    "hugging_face_images",
    "images_through_curl",
    "images_through_rclone",
    "obstore_images",
    "s3torchconnector_images",
    "torchdata",
    "torchdata_images",
    "webdataset",
    "webdataset_pinned",
]


class Source(NamedTuple):
    """What is in S3, and how to read it.

    Attributes:
        urls: the URLs of shards.
        addresses: their web addresses.
        indexes: the folder of their indexes.
        copy: the URL of a copy in the format of a loader.
        read_ahead: the number of bytes to read ahead, if it is not the default.
    """

    urls: list[str]
    addresses: list[str]
    indexes: str
    copy: str
    read_ahead: int | None = None


def webdataset(urls: list[str], workers: int) -> Iterable[Batch]:
    """Return the pipeline of webdataset in its ``WebLoader``, which reads from S3 through a command."""
    return _webdataset(urls, workers, BATCH, pin_memory=False)


def webdataset_pinned(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterable[Batch]:
    return _webdataset(urls * PASSES, workers, batch, pin_memory=device.type == "cuda")


def _webdataset(urls: list[str], workers: int, batch: int, *, pin_memory: bool) -> Iterable[Batch]:
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
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True)
    pairs = rows.map(crop_row, remove_columns=["__key__", "__url__", "jpg", "cls"])
    return DataLoader(pairs, batch_size=BATCH, num_workers=workers, collate_fn=stack_rows)


def _images_of_webdataset(urls: Iterable[str]) -> Iterator[bytes]:
    import webdataset as wds
    from webdataset.tariterators import tarfile_to_samples

    return (sample["jpg"] for sample in wds.DataPipeline(wds.SimpleShardList(list(urls)), tarfile_to_samples()))


def images_through_rclone(source: Source) -> Iterator[bytes]:
    return _images_of_webdataset(url.replace("s3://", "pipe:rclone cat :s3:") for url in source.urls)


def images_through_curl(source: Source) -> Iterator[bytes]:
    return _images_of_webdataset(source.addresses)


def torchdata_images(source: Source) -> Iterator[bytes]:
    import torchdata.datapipes.iter as pipes

    files = pipes.FSSpecFileOpener(pipes.IterableWrapper(source.urls), mode="rb")
    return (sample[".jpg"].read() for sample in files.load_from_tar(mode="r:").webdataset())


def hugging_face_images(source: Source) -> Iterator[bytes]:
    import datasets

    datasets.disable_progress_bars()
    files = {"train": source.addresses}  # from S3, its streams end with an error of s3fs
    rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    return (row["jpg"]["bytes"] for row in rows.cast_column("jpg", datasets.Image(decode=False)))


def s3torchconnector_images(source: Source) -> Iterator[bytes]:
    from s3torchconnector import S3ClientConfig, S3IterableDataset

    objects = S3IterableDataset.from_objects(
        source.urls,
        region="us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    for reader in objects:
        yield from _images_in_tar(reader)


def obstore_images(source: Source) -> Iterator[bytes]:
    """Yield images from the streams of obstore, in a process that has not forked."""
    from obstore.store import S3Store  # type: ignore[import-not-found]  # it may not be installed

    place = urlsplit(source.urls[0])
    bucket = S3Store(place.netloc, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
    for url in source.urls:
        chunks = iter(bucket.get(urlsplit(url).path.lstrip("/")).stream(min_chunk_size=1 << 20))
        yield from _images_in_tar(SimpleNamespace(read=lambda _size, chunks=chunks: bytes(next(chunks, b""))))


def _images_in_tar(stream: Any) -> Iterator[bytes]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            data = archive.extractfile(member).read()  # type: ignore[union-attr]  # all members are files
            if member.name.endswith(".jpg"):
                yield data
