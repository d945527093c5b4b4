"""The table of all loaders: what each takes part in, and what it needs.

To add one, write a function that returns its batches (in ours.py, tar.py or peers.py), and add it
here. Loaders whose packages are not installed are left out, and the output says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.crops import Batch

from loaders import peers, tar
from loaders.tar import Source

__all__ = ["LOADERS", "LOCAL", "OURS", "REFERENCE", "S3_REFERENCE", "Loader", "Package"]

OURS = "ours"
REFERENCE = "webdataset"
#: The reference among those that read images from S3.
S3_REFERENCE = "webdataset, rclone"
#: The name of the store that is a local disk.
LOCAL = "local"


class Package(NamedTuple):
    """What a loader needs.

    Attributes:
        distribution: the name under which it is installed, for the version.
        modules: what it imports, before anything is measured.
        environment: the name of the environment with its packages; none means this interpreter.
    """

    distribution: str
    modules: tuple[str, ...] = ()
    environment: str = ""


class Loader(NamedTuple):
    """A participant.

    Attributes:
        package: what it needs.
        batches: takes paths or URLs, or that of a folder with a converted copy, and the number of workers; returns
            batches of crops.
        images: takes what is in S3, and returns the images without decoding them.
        on_gpu: takes URLs, the number of workers, the number of samples in a batch, and the device; returns batches on
            the GPU, or in page-locked memory.
        gpu_workers: the numbers of worker processes to measure with a GPU, or of threads in the case of DALI.
        convert: writes a converted copy of shards to a folder.
        has_same_boxes: it cuts the same boxes as the others.
        reads_http: it reads batches from web servers as well.
        reads_s3: it reads batches from S3 as well.
    """

    package: Package
    batches: Callable[[Any, int], Iterable[Batch]] | None = None
    images: Callable[[Source], Iterator[bytes]] | None = None
    on_gpu: Callable[[list[str], int, int, torch.device], Iterable[Batch]] | None = None
    gpu_workers: tuple[int, ...] = ()
    convert: Callable[[list[str], Path], None] | None = None
    has_same_boxes: bool = True
    reads_http: bool = False
    reads_s3: bool = False


def ours(name: str) -> Callable[..., Any]:
    """Return a function of ours.py, which is imported on use, because that patches torchdata."""

    def build(*arguments: Any) -> Any:
        return getattr(importlib.import_module("loaders.ours"), name)(*arguments)

    return build


WDS_DATAPIPES = Package("wds-datapipes", ("loaders.ours", "torchdata.dataloader2"))
WITHOUT_TORCHDATA = Package("wds-datapipes", ("loaders.ours",))
WEBDATASET = Package("webdataset", ("webdataset",))
TORCHDATA = Package("torchdata", ("torchdata.datapipes.iter", "torchdata.dataloader2"))
HUGGING_FACE = Package("datasets", ("datasets",), "hugging_face")
LITDATA = Package("litdata", ("litdata",), "litdata")
STREAMING = Package("mosaicml-streaming", ("streaming",), "streaming")
SPDL = Package("spdl_io", ("spdl.io", "spdl.pipeline"), "spdl")
DALI = Package("nvidia-dali-cuda120", ("nvidia.dali.plugin.pytorch",), "dali")
S3TORCHCONNECTOR = Package("s3torchconnector", ("s3torchconnector",), "s3torchconnector")
OBSTORE = Package("obstore", ("obstore",), "obstore")

LOADERS = {
    OURS: Loader(
        WDS_DATAPIPES, ours("batches"), on_gpu=ours("pinned"), gpu_workers=(1, 2, 4, 8, 16),
        reads_http=True, reads_s3=True,
    ),
    "ours, min_size": Loader(WDS_DATAPIPES, ours("batches_of_min_size")),
    "ours, Pillow": Loader(WDS_DATAPIPES, ours("batches_by_pillow")),
    "ours, DataLoader": Loader(
        WITHOUT_TORCHDATA, ours("batches_of_dataloader"), on_gpu=ours("pinned_by_dataloader"), gpu_workers=(4, 8, 16)
    ),
    "ours, stream": Loader(WDS_DATAPIPES, images=ours("streamed_images")),
    "ours, by index": Loader(WDS_DATAPIPES, images=ours("indexed_images")),
    REFERENCE: Loader(
        WEBDATASET, tar.webdataset, on_gpu=tar.webdataset_pinned, gpu_workers=(1, 2, 4, 8, 16),
        reads_http=True, reads_s3=True,
    ),
    S3_REFERENCE: Loader(WEBDATASET, images=tar.images_through_rclone),
    "webdataset, curl": Loader(WEBDATASET, images=tar.images_through_curl),
    "torchdata": Loader(TORCHDATA, tar.torchdata, tar.torchdata_images, reads_s3=True),
    "Hugging Face datasets": Loader(
        HUGGING_FACE, tar.hugging_face, tar.hugging_face_images, reads_s3=True
    ),
    "LitData": Loader(
        LITDATA, peers.litdata, peers.litdata_images, convert=peers.convert_for_litdata,
        reads_s3=True,
    ),
    "MosaicML Streaming": Loader(
        STREAMING, peers.streaming, peers.streaming_images, convert=peers.convert_for_streaming,
        reads_s3=True,
    ),
    "SPDL": Loader(SPDL, peers.spdl),
    "DALI": Loader(DALI, peers.dali, has_same_boxes=False, reads_s3=True),
    "DALI, crop while decoding": Loader(DALI, peers.dali_fused, has_same_boxes=False, reads_s3=True),
    "s3torchconnector": Loader(S3TORCHCONNECTOR, images=tar.s3torchconnector_images),
    "obstore": Loader(OBSTORE, images=tar.obstore_images),
    "ours, torchvision decodes on the GPU": Loader(
        WDS_DATAPIPES, on_gpu=ours("decoded_by_torchvision"), gpu_workers=(1, 2)
    ),
    "ours, not pinned": Loader(WDS_DATAPIPES, on_gpu=ours("not_pinned"), gpu_workers=(16,)),
    "ours, DALI decodes on the GPU": Loader(
        DALI, on_gpu=ours("decoded_by_dali"), gpu_workers=(1, 4, 8), has_same_boxes=False
    ),
    "DALI on the GPU": Loader(DALI, on_gpu=peers.dali_on_gpu, gpu_workers=(1, 4, 8), has_same_boxes=False),
    "DALI on the GPU, crop while decoding": Loader(
        DALI, on_gpu=peers.dali_fused_on_gpu, gpu_workers=(8,), has_same_boxes=False
    ),
}  # fmt: skip
