"""The loaders that bench_end_to_end.py measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import peer_loaders
import tar_loaders

__all__ = ["LOADERS", "LOCAL", "OURS", "REFERENCE", "Loader"]

OURS = "ours"
REFERENCE = "webdataset"
#: The name of the store that is a local disk.
LOCAL = "local"


class Loader(NamedTuple):
    """A participant.

    Attributes:
        build: takes paths or URLs, or that of a folder with a converted copy, and the number of workers; returns
            batches.
        distribution: the name under which its package is installed, for the version.
        packages: what it imports, before anything is measured.
        environment: the name of the environment with its packages; none means this interpreter.
        convert: writes a converted copy of shards to a folder.
        has_same_boxes: it cuts the same boxes as the others.
        reads_http: it reads from web servers as well.
        reads_s3: it reads from S3 as well.
    """

    build: Callable[[Any, int], Iterable[tar_loaders.Batch]]
    distribution: str
    packages: tuple[str, ...]
    environment: str = ""
    convert: Callable[[list[str], Path], None] | None = None
    has_same_boxes: bool = True
    reads_http: bool = False
    reads_s3: bool = False


#: What our loaders import.
PACKAGES = ("our_pipelines", "torchdata.dataloader2")
#: The distribution, the packages and the environment of DALI.
DALI = "nvidia-dali-cuda120", ("nvidia.dali.plugin.pytorch",), "dali"

LOADERS = {
    OURS: Loader(tar_loaders.ours, "wds-datapipes", PACKAGES, reads_http=True, reads_s3=True),
    "ours, min_size": Loader(tar_loaders.ours_scaled, "wds-datapipes", PACKAGES),
    "ours, Pillow": Loader(tar_loaders.ours_with_pillow, "wds-datapipes", PACKAGES),
    "ours, DataLoader": Loader(tar_loaders.dataloader, "wds-datapipes", ("our_pipelines",)),
    REFERENCE: Loader(tar_loaders.webdataset, "webdataset", ("webdataset",), reads_http=True, reads_s3=True),
    "torchdata": Loader(
        tar_loaders.torchdata, "torchdata", ("torchdata.datapipes.iter", "torchdata.dataloader2"), reads_s3=True
    ),
    "Hugging Face datasets": Loader(tar_loaders.hugging_face, "datasets", ("datasets",), "hugging_face", reads_s3=True),
    "LitData": Loader(
        peer_loaders.litdata, "litdata", ("litdata",), "litdata", peer_loaders.convert_for_litdata, reads_s3=True
    ),
    "MosaicML Streaming": Loader(
        peer_loaders.streaming,
        "mosaicml-streaming",
        ("streaming",),
        "streaming",
        peer_loaders.convert_for_streaming,
        reads_s3=True,
    ),
    "SPDL": Loader(peer_loaders.spdl, "spdl_io", ("spdl.io", "spdl.pipeline"), "spdl"),
    "DALI": Loader(peer_loaders.dali, *DALI, has_same_boxes=False, reads_s3=True),
    "DALI, crop while decoding": Loader(peer_loaders.dali_fused, *DALI, has_same_boxes=False, reads_s3=True),
}
