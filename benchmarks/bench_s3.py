"""Which loader reads S3 with the least time, processor time and requests, near and far?

    python benchmarks/bench_s3.py --json s3.json --plot s3.png

Each loader reads the images of shards in S3, or of a copy in its own format, without decoding them, in one process.
Ours reads them as a stream, and by index in shuffled windows. webdataset reads through ``rclone cat``, and through
curl from web addresses, as with presigned URLs, and Hugging Face datasets from these addresses. s3torchconnector reads
objects for Python's ``tarfile``.

The server runs on the same machine, and its processor time does not count. It counts requests, and responds immediately
and at full speed, or after 20 or 100 ms with 90 MB/s per connection. Loaders take turns, each in its own process and
environment. Figures are those of a second pass of a process, so that imports do not count. The processor time includes
that of commands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from contest import options, parse, write_report
from datasets import PHOTOGRAPHS, folder
from environments import environment_variables, python_of
from measure_loader import LoaderError, convert
from plots import plot_ratios
from processes import cpu_seconds
from report import section_of_s3
from rich.console import Console
from store import BUCKET, distant_s3, request_count
from tar_loaders import import_package

from wds_datapipes.index import build_indexes

#: The latency in seconds, and the bandwidth of a connection in bytes per second; AWS gives 85 to 90 MB/s.
SERVERS = {"at once": (0.0, 1e12), "20 ms": (0.02, 9e7), "100 ms": (0.1, 9e7)}
#: The number of shards and of passes, and the time limit of a measurement in seconds.
SHARDS, PASSES, TIME_LIMIT_S = 4, 2, 120


class Source(NamedTuple):
    """What loaders read: the addresses of shards in S3 and over HTTP, the folder of their indexes, and a copy."""

    urls: list[str]
    addresses: list[str]
    indexes: str
    copy: str


def stream(source: Source) -> Iterator[bytes]:
    from wds_datapipes import ShardList

    return (sample["jpg"] for sample in ShardList(source.urls).load_wds_shards().group_samples())


def by_index(source: Source) -> Iterator[bytes]:
    from wds_datapipes import IndexedSamples
    from wds_datapipes.index import AccessOptions, Manifest, build_indexes

    access = AccessOptions(index_dir=source.indexes)
    return (
        sample["jpg"]
        for sample in IndexedSamples(Manifest(build_indexes(source.urls, index_dir=source.indexes)), access=access)
    )


def webdataset(urls: Iterable[str]) -> Iterator[bytes]:
    import webdataset as wds
    from webdataset.tariterators import tarfile_to_samples

    return (sample["jpg"] for sample in wds.DataPipeline(wds.SimpleShardList(list(urls)), tarfile_to_samples()))


def through_rclone(source: Source) -> Iterator[bytes]:
    return webdataset(url.replace("s3://", "pipe:rclone cat :s3:") for url in source.urls)


def through_curl(source: Source) -> Iterator[bytes]:
    return webdataset(source.addresses)


def torchdata(source: Source) -> Iterator[bytes]:
    import torchdata.datapipes.iter as pipes

    files = pipes.FSSpecFileOpener(pipes.IterableWrapper(source.urls), mode="rb")
    return (sample[".jpg"].read() for sample in files.load_from_tar(mode="r:").webdataset())


def hugging_face(source: Source) -> Iterator[bytes]:
    datasets = import_package("datasets")
    datasets.disable_progress_bars()
    files = {"train": source.addresses}  # from S3, its streams end with an error of s3fs
    rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    return (row["jpg"]["bytes"] for row in rows.cast_column("jpg", datasets.Image(decode=False)))


def litdata(source: Source) -> Iterator[bytes]:
    import litdata as package
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
    return (row["jpg"] for row in package.StreamingDataset(source.copy, cache_dir=tempfile.mkdtemp()))


def streaming(source: Source) -> Iterator[bytes]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return (row["jpg"] for row in StreamingDataset(remote=source.copy, local=tempfile.mkdtemp(), batch_size=1))


def s3torchconnector(source: Source) -> Iterator[bytes]:
    import tarfile

    from s3torchconnector import S3ClientConfig, S3IterableDataset

    objects = S3IterableDataset.from_objects(
        source.urls,
        region="us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    for reader in objects:
        with tarfile.open(fileobj=reader, mode="r|") as archive:
            for member in archive:
                data = archive.extractfile(member).read()  # type: ignore[union-attr]  # all members are files
                if member.name.endswith(".jpg"):
                    yield data


class Reader(NamedTuple):
    """A loader: what reads the images, and the loader whose environment and copies it uses, or that environment."""

    read: Callable[[Source], Iterator[bytes]]
    loader: str = ""
    environment: str = ""


REFERENCE = "webdataset, rclone"
READERS = {
    "ours, stream": Reader(stream),
    "ours, by index": Reader(by_index),
    REFERENCE: Reader(through_rclone),
    "webdataset, curl": Reader(through_curl),
    "torchdata": Reader(torchdata),
    "Hugging Face datasets": Reader(hugging_face, environment="hugging_face"),
    "LitData": Reader(litdata, "LitData", "litdata"),
    "MosaicML Streaming": Reader(streaming, "MosaicML Streaming", "streaming"),
    "s3torchconnector": Reader(s3torchconnector, environment="s3torchconnector"),
}


def read_all(name: str, source: Source) -> dict[str, float]:
    """Read everything, and some times again; return the number and the bytes of the images, and what that took."""
    for _ in READERS[name].read(source):  # imports, and makes clients
        pass
    address = os.environ["AWS_ENDPOINT_URL"]
    images = size = 0
    before, begin, cpu = request_count(address), time.perf_counter(), cpu_seconds()
    for _ in range(PASSES):
        for image in READERS[name].read(source):
            images, size = images + 1, size + len(image)
    elapsed, spent = time.perf_counter() - begin, cpu_seconds() - cpu
    requests = (request_count(address) - before) / PASSES
    return {"images": images, "bytes": size, "s": elapsed, "cpu_s": spent, "requests": requests}


def measure(name: str, source: Source) -> dict[str, float]:
    """Read everything in a new process."""
    environment = READERS[name].environment
    python = python_of(environment) if environment else Path(sys.executable)
    if not python.exists():
        raise LoaderError("it is not installed")
    with tempfile.TemporaryDirectory() as temporary:
        variables = environment_variables(environment) | {"TMPDIR": temporary, "HF_HOME": temporary}
        command = [str(python), "-W", "ignore", __file__, "--read", name, json.dumps(source)]
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise LoaderError(f"did not end within {TIME_LIMIT_S} s") from None
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode:
        raise LoaderError(lines[-1] if lines else f"ended with status {done.returncode}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def compare(
    server: str, names: list[str], sources: Callable[[str, str], Source], paths: list[str], rounds: int
) -> dict[str, Any]:
    """Return the runs of each loader from a server, and why some are left out."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    left_out: dict[str, str] = {}
    with distant_s3(paths, *SERVERS[server]) as address:
        for _ in range(rounds):
            for name in names:
                if name in left_out:
                    continue
                try:
                    run = measure(name, sources(name, address))
                    if runs[REFERENCE] and (run["images"], run["bytes"]) != tuple(
                        runs[REFERENCE][0][figure] for figure in ("images", "bytes")
                    ):
                        raise LoaderError(f"it read {run['images']:.0f} images of {run['bytes']:.0f} bytes")
                except LoaderError as error:
                    if name == REFERENCE or name.startswith("ours"):
                        raise
                    left_out[name] = str(error)
                else:
                    runs[name].append(run)
    return {
        "server": server,
        "reference": REFERENCE,
        "runs": {name: some for name, some in runs.items() if some and name not in left_out},
        "left_out": left_out,
    }


def main() -> None:
    arguments = parse(options(__doc__, rounds=3))
    data = folder(arguments.data)
    some = PHOTOGRAPHS["IMG"]._replace(name="S3", shards=SHARDS, samples=192)
    shards = some.write(data, arguments.scale)
    copies: dict[str, str] = {}
    lacking: dict[str, str] = {}
    for name, reader in READERS.items():
        if reader.loader:
            copies[name] = f"{data}/{Path(shards[0]).stem}-{reader.environment}"
            try:
                if not Path(copies[name]).exists():
                    convert(reader.loader, shards, f"{copies[name]}.partial")
                    Path(f"{copies[name]}.partial").rename(copies[name])
            except LoaderError as error:
                lacking[name] = str(error)
                shutil.rmtree(f"{copies.pop(name)}.partial", ignore_errors=True)
    servers = list(SERVERS)[: 1 if arguments.quick else None]
    names = sorted((name for name in READERS if name not in lacking), key=lambda name: name != REFERENCE)
    with tempfile.TemporaryDirectory() as indexes:
        # Indexes are named by shards, and shards by addresses, which are the same for all servers.
        build_indexes(shards, index_dir=indexes)

        def source_of(name: str, address: str) -> Source:
            urls = [f"s3://{BUCKET}/{Path(path).name}" for path in shards]
            addresses = [f"{address}/{BUCKET}/{Path(path).name}" for path in shards]
            copy = f"s3://{BUCKET}/{Path(copies[name]).name}" if name in copies else ""
            return Source(urls, addresses, indexes, copy)

        facts = [compare(server, names, source_of, [*shards, *copies.values()], arguments.rounds) for server in servers]
    for each in facts:
        each["left_out"] |= lacking
    section = section_of_s3(facts)
    Console(width=165).print(section.text, markup=False)
    write_report(arguments.json, facts)
    plot_ratios(arguments.plot, section.panels)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        print(json.dumps(read_all(sys.argv[2], Source(*json.loads(sys.argv[3])))), flush=True)
        os._exit(0)  # without waiting for threads that loaders leave
    main()
