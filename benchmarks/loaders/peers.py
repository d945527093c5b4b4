"""The loaders with an engine or a format of their own: DALI, SPDL, LitData and MosaicML Streaming.

They keep the contract of table.py. LitData and Streaming read a folder that their converter writes from the same
shards, with the same bytes; from S3, they copy it to a temporary folder. DALI and SPDL decode in threads of the
training process, as many as the others have workers.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness.crops import AREA, ATTEMPTS, BATCH, PASSES, RATIO, SIZE, Batch, draw_cut, random_resized_crop
from PIL import Image
from torch.utils.data import DataLoader

from loaders.tar import Source

__all__ = [
    "convert_for_litdata",
    "convert_for_streaming",
    "dali",
    "dali_fused",
    "dali_fused_on_gpu",
    "dali_on_gpu",
    "litdata",
    "litdata_images",
    "read_pairs",
    "spdl",
    "streaming",
    "streaming_images",
]


def read_pairs(urls: Iterable[str]) -> Iterator[tuple[bytes, int]]:
    """Yield the JPEG file and the label of each sample, with the standard library."""
    for url in urls:
        with tarfile.open(url, "r:") as archive:
            jpeg = b""
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                if member.name.endswith(".jpg"):
                    jpeg = file.read()
                else:
                    yield jpeg, int(file.read())


def decode_record(record: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return random_resized_crop(Image.open(io.BytesIO(record["jpg"]))), record["cls"]


def _dali(
    urls: list[str],
    workers: int,
    *,
    is_fused: bool,
    batch: int = BATCH,
    device_id: int | None = None,
    samples: Any = None,
    passes: int = 1,
) -> Iterator[Batch]:
    """Yield batches of DALI, on a GPU if ``device_id`` is given.

    ``samples`` is one of our pipelines. DALI reads it instead of the shards, once per pass.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(  # type: ignore[untyped-decorator]  # DALI has no types here
        batch_size=batch, num_threads=max(workers, 1), device_id=device_id, prefetch_queue_depth=2
    )
    def pipeline() -> Any:
        if samples is None:
            jpegs, labels = fn.readers.webdataset(paths=urls, ext=["jpg", "cls"], name="Reader")
        else:
            from wds_datapipes.integrations.dali import external_source

            jpegs, labels = external_source(samples, extensions=["jpg", "cls"])
        place = "cpu" if device_id is None else "mixed"
        options = {"random_area": AREA, "random_aspect_ratio": RATIO, "num_attempts": ATTEMPTS}
        if is_fused:
            images = fn.decoders.image_random_crop(jpegs, device=place, **options)
            images = fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=True)
        else:
            images = fn.random_resized_crop(
                fn.decoders.image(jpegs, device=place),
                size=SIZE,
                interp_type=types.INTERP_LINEAR,
                antialias=True,
                **options,
            )
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(images, mirror=mirror, dtype=types.UINT8, output_layout="CHW"), labels

    powers = 10 ** torch.arange(5, -1, -1)
    reader = {"reader_name": "Reader", "last_batch_policy": LastBatchPolicy.PARTIAL} if samples is None else {}
    batches = DALIGenericIterator([pipeline()], ["images", "digits"], **reader, auto_reset=True)
    for _ in range(passes):
        for (found,) in batches:
            yield found["images"], ((found["digits"].cpu().long() - ord("0")) * powers).sum(1)


def dali(urls: list[str], workers: int) -> Iterable[Batch]:
    """DALI on the CPU: decode, then crop."""
    return _dali(urls, workers, is_fused=False)


def dali_fused(urls: list[str], workers: int) -> Iterable[Batch]:
    """DALI on the CPU, which decodes only the crop."""
    return _dali(urls, workers, is_fused=True)


def dali_on_gpu(
    urls: list[str], workers: int, batch: int, device: torch.device, *, is_fused: bool = False, samples: Any = None
) -> Iterator[Batch]:
    """DALI on the GPU, with its own reader or fed by one of our pipelines."""
    index = device.index or 0 if device.type == "cuda" else None
    return _dali(urls, workers, is_fused=is_fused, batch=batch, device_id=index, samples=samples, passes=PASSES)


def dali_fused_on_gpu(urls: list[str], workers: int, batch: int, device: torch.device) -> Iterator[Batch]:
    """DALI on the GPU, which decodes only the crop."""
    return dali_on_gpu(urls, workers, batch, device, is_fused=True)


def spdl(urls: list[str], workers: int) -> Iterator[Batch]:
    """SPDL, which decodes, crops and resizes with FFmpeg, to the boxes of the others."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def read() -> Iterator[tuple[bytes, int]]:
        for url in urls:
            with Path(url).open("rb") as file:
                jpeg = b""
                for name, data in spdl.io.iter_tarfile(file):
                    if name.endswith(".jpg"):
                        jpeg = data
                    else:
                        yield jpeg, int(data)

    def decode(pair: tuple[bytes, int]) -> tuple[Any, int]:
        packets = spdl.io.demux_image(pair[0])
        cut = draw_cut(packets.width, packets.height)
        filters = (
            f"crop={cut.width}:{cut.height}:{cut.left}:{cut.top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear,"
            f"{'hflip,' if cut.is_mirrored else ''}format=pix_fmts=rgb24"
        )
        return spdl.io.decode_packets(packets, filter_desc=filters), pair[1]

    def collate(pairs: list[tuple[Any, int]]) -> Batch:
        frames, labels = zip(*pairs, strict=True)
        images = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
        return images.permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)

    threads = max(workers, 1)
    builder = PipelineBuilder().add_source(read()).pipe(decode, concurrency=threads)
    pipeline = builder.aggregate(BATCH).pipe(collate).add_sink(3).build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline


def convert_for_litdata(urls: list[str], folder: Path) -> None:
    import litdata

    litdata.optimize(_litdata_records, urls, str(folder), chunk_bytes="32MB", num_workers=1, verbose=False)


def _litdata_records(url: str) -> Iterator[dict[str, Any]]:
    for jpeg, label in read_pairs([url]):
        yield {"jpg": jpeg, "cls": label}


def litdata(folder: str, workers: int) -> Iterable[Batch]:
    """LitData, from chunks of its own format."""
    from litdata import StreamingDataLoader

    loader: Iterable[Batch] = StreamingDataLoader(
        _litdata(folder, transform=decode_record), batch_size=BATCH, num_workers=workers
    )
    return loader


def litdata_images(source: Source) -> Iterator[bytes]:
    return (row["jpg"] for row in _litdata(source.copy))


def _litdata(folder: str, **options: Any) -> Any:
    """Return a dataset, which copies chunks that are not local to a temporary folder."""
    import litdata as package
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
    copies = tempfile.mkdtemp() if "://" in folder else None
    return package.StreamingDataset(folder, cache_dir=copies, **options)


def convert_for_streaming(urls: list[str], folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "cls": "int"}, size_limit="32mb") as writer:
        for jpeg, label in read_pairs(urls):
            writer.write({"jpg": jpeg, "cls": label})


def streaming(folder: str, workers: int) -> Iterable[Batch]:
    """MosaicML Streaming, from shards of its own format."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # of measurements whose processes were killed

    class Crops(StreamingDataset):  # type: ignore[misc]  # a class of a package that has no types here
        def __getitem__(self, index: Any) -> Any:
            return decode_record(super().__getitem__(index))

    places = {"remote": folder, "local": tempfile.mkdtemp()} if "://" in folder else {"local": folder}
    return DataLoader(Crops(**places, batch_size=BATCH), batch_size=BATCH, num_workers=workers)


def streaming_images(source: Source) -> Iterator[bytes]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return (row["jpg"] for row in StreamingDataset(remote=source.copy, local=tempfile.mkdtemp(), batch_size=1))
