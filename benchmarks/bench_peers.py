"""Which loader reads shards of images with the least time, processor time and requests, here and from servers?

    python benchmarks/bench_peers.py --only end_to_end --workers 2 --stores "100 ms" S3
    python benchmarks/bench_peers.py --only s3

- **end_to_end**: batches of cropped images reach the training process, from the disk, web servers and S3.
- **s3**: images are read from S3 without decoding them, near and far (measures/images_in_s3.py).

loaders/table.py is the table of all loaders. Those with dependencies of their own run in the environments of
environments.py. Loaders that are not installed, or fail, are left out, and the output says so.

**end_to_end**. Each loader reads shards, decodes JPEG files, crops, resizes to 224 x 224 (bilinear, antialiased),
flips, and delivers batches of 64 x 3 x 224 x 224 bytes with 64 labels to the training process, which reads a byte of
each page. The images are photographs of 400 to 500 pixels (IMG) and of two megapixels (PHOTO).

Equal work is checked before anything is timed: each sample comes exactly once, and the pixels of a part of them are
compared with Pillow's. Boxes follow from the size of an image, so that all loaders cut the same ones. Only DALI draws
its own, from the same distribution, and only the mean of its pixels is compared. The difference to Pillow's pixels is
part of the table, in levels of 255.

"ours" crops while decoding, into the tensor of a batch; "min_size" also decodes at a smaller scale where that has the
pixels of the crop. "Pillow" runs the same code on a sample as most other loaders, and "DataLoader" is PyTorch's.

Each measurement runs in a separate process, killed with its workers at the end, and loaders take turns. The rate is
that between the first quarter and the last eighth of an epoch: neither startup nor the end counts. CPU time is that of
all processes. The time to the first batch includes building the loader, but no imports. Memory is the increase of all
processes together (PSS); that of the workers is divided by their number.

``--stores`` also reads from servers on the same machine, with the most workers:

- "HTTP", "10 ms" and "100 ms": a web server that responds at once or after a latency, the latter with 100 MB/s per
  connection. Ours and webdataset take part.
- "S3": rclone's S3 server. Loaders read it as their users do: ours, torchdata and Hugging Face datasets through s3fs,
  DALI, LitData and MosaicML Streaming by clients of their own, and webdataset through a command. SPDL has no client.
- "S3, presigned": the same by https, from URLs that contain a signature. Ours and webdataset take part.

**s3**. Each loader reads the images of shards in S3, or of a copy in its own format, in one process. Ours reads them as
a stream, and by index in shuffled windows. webdataset reads through ``rclone cat``, and through curl from web
addresses, as with presigned URLs, and Hugging Face datasets from these addresses. s3torchconnector reads objects for
Python's ``tarfile``.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

from harness.crops import BATCH
from harness.datasets import PHOTOGRAPHS
from harness.questions import Question, answer, options
from loaders.peers import read_pairs
from loaders.table import LOADERS, OURS, REFERENCE, S3_REFERENCE
from measures.end_to_end import PRESIGNED, S3, SERVERS, compare
from measures.images_in_s3 import compare_readers, readers_of

#: The number of batches that a measurement needs, unless its figures do not matter.
LEAST_BATCHES = 8
#: The shards of images in S3.
S3_SHARDS = PHOTOGRAPHS["IMG"]._replace(name="S3", shards=4, samples=768)


def selected(arguments: Namespace, first: str, kind: str) -> list[str]:
    """Return the names of the loaders of a kind that the command line selects, the reference first."""
    names = [name for name, loader in LOADERS.items() if getattr(loader, kind) is not None]
    names = [name for name in names if name in (OURS, first) or arguments.loaders in name]
    return sorted(names, key=lambda name: name != first)


def end_to_end(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare batches of crops on each dataset."""
    if arguments.quick:
        arguments.sets, arguments.workers = ["IMG"], arguments.workers[-1:]
    # The reference first, since the pixels of others are compared with its own.
    names = selected(arguments, REFERENCE, "batches")
    shards = {name: PHOTOGRAPHS[name].write(arguments.data, arguments.scale, multiple=16) for name in arguments.sets}
    samples = {name: sum(1 for _ in read_pairs(paths)) for name, paths in shards.items()}
    for name, count in samples.items():
        if count < LEAST_BATCHES * BATCH and not arguments.quick:
            raise SystemExit(f"--scale {arguments.scale:g} leaves {count} samples of {name}: too few for a rate")
    found = [compare(name, paths, samples[name], names, arguments) for name, paths in shards.items()]
    return list(itertools.chain.from_iterable(found))


def s3(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare reading images from each server."""
    return compare_readers(readers_of(selected(arguments, S3_REFERENCE, "images")), S3_REFERENCE, S3_SHARDS, arguments)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="numbers of workers (2)")
    parser.add_argument("--sets", nargs="+", default=list(PHOTOGRAPHS), choices=PHOTOGRAPHS, help="the datasets (all)")
    parser.add_argument(
        "--stores", nargs="+", default=[], choices=[*SERVERS, S3, PRESIGNED], help="the servers to read from as well"
    )
    parser.add_argument(
        "--loaders", default="", help="run only ours, the reference and loaders with this text in the name"
    )
    answer(parser, Question("end_to_end", end_to_end, 3), Question("s3", s3, 3))


if __name__ == "__main__":
    main()
