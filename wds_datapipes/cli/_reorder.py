"""Samples of a dataset in another order: what ``shuffle`` and ``sort`` share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import Output, check_outputs, report, with_option_hint
from wds_datapipes.cli._meter import ProgressMeter
from wds_datapipes.errors import SampleError, ShardError, UnwritableSampleError
from wds_datapipes.io.compression.compress import Compress, compression_kind
from wds_datapipes.io.openers import local_path
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.io.sinks.local_sink import LocalSink
from wds_datapipes.prepare.reorder.external_sort import ExternalSort, file_bytes
from wds_datapipes.prepare.reorder.sorted_runs import check_room
from wds_datapipes.prepare.subset import Subset
from wds_datapipes.tar.header_writer import HeaderWriter
from wds_datapipes.types import Sample
from wds_datapipes.writing.sample_packer import SamplePacker
from wds_datapipes.writing.shard_names import NUMBER

__all__ = ["Memory", "Rekey", "Temporary", "reorder"]

#: How many stores are asked at once how large their shards are.
ASKED_AT_ONCE = 16

Memory: TypeAlias = Annotated[
    str, typer.Option("--memory", metavar="BYTES", help="The most memory for samples, such as 500MB or 2GiB.")
]
Temporary: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tmp",
        metavar="FOLDER",
        help="Where the temporary file is, which may be as large as the dataset; the system's folder by default.",
        show_default=False,
    ),
]
Rekey: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="PATTERN",
        help="New keys, of {number} in the input, {key}, {name} and {shard}, such as '{number:08d}'.",
    ),
]


def reorder(
    urls: list[str],
    order: Callable[[Sample], Any],
    target: str,
    *,
    reverse: bool = False,
    excerpt: Mapping[str, Any],
    memory_bytes: int,
    tmp: Path | None,
    compress: Compress,
    skip_bad: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the samples of shards in another order, and report what was written.

    Args:
        urls: the shards.
        order: tells what a sample is sorted by.
        target: where to write, as for `Output`.
        reverse: the largest come first.
        excerpt: how the shards are read, as for `Subset`.
        memory_bytes: how much memory samples may take.
        tmp: where the temporary file is.
        compress: as for `Output`.
        skip_bad: pass over errors.
        as_json: report facts as JSON.
        **options: for `Output`.
    """
    if as_json and target == "-":
        raise WrongUse("--json and the archive cannot both go to standard output. Name a file with --output")
    folder = str(tmp or tempfile.gettempdir())
    faults: list[Exception] = []

    def passes(error: Exception) -> bool:
        faults.append(error)
        return True

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except SampleError as error:
            if not skip_bad:
                raise
            faults.append(error)

    try:
        reading = Subset(on_error=passes if skip_bad else "raise", **excerpt)
    except ValueError as error:
        raise WrongUse(str(error)) from None
    storage_options, rule = excerpt["storage_options"], excerpt["key_rule"]
    headers = HeaderWriter(user="", group="", mode=0o644, mtime=0)
    packer = SamplePacker(headers, encoder=False, unsafe=False, keep_meta=False, key_rule=rule)
    with (
        Output(
            target, urls=urls, compress=compress, key_rule=rule, storage_options=storage_options, **options
        ) as output,
        ExternalSort(memory_bytes=memory_bytes, folder=folder, reverse=reverse) as sorting,
    ):
        if NUMBER.search(target) and (path := local_path(target % 0)) is not None:
            LocalSink(target % 0, path).discard()  # whether one can write there is known before all is read
        check_room(room_needed(urls, target, folder, memory_bytes, compress, storage_options))
        shown = target != "-"
        with ProgressMeter("Reading, 1 of 2", len(urls), shown=shown) as meter:
            latest = ""

            def seen(sample: Sample) -> None:
                nonlocal latest
                is_next = bool(latest) and sample["__url__"] != latest
                latest = sample["__url__"]
                meter.add(shards=is_next, samples=1, size=data_bytes(sample))

            for sample in reading.samples(urls, on_read=seen):
                with noting():
                    try:
                        packer.pack(sample)  # what cannot be written is known before anything is
                        sorting.add(order(sample), sample)
                    except UnwritableSampleError as error:
                        raise with_option_hint(error) from None
        with ProgressMeter("Writing, 2 of 2", sorting.count, shown=shown, unit="samples") as meter:
            for sample in sorting.samples():
                with noting():
                    output.write(sample)
                meter.add(samples=1, size=data_bytes(sample))
    report(output.shards if shown else [], faults, as_json=as_json)
    check_outputs([output], urls)


def data_bytes(sample: Sample) -> int:
    """Return how large the fields of a sample are together."""
    return sum(len(value) for value in sample.values() if type(value) is bytes)


def room_needed(
    urls: Sequence[str],
    target: str,
    folder: str,
    memory_bytes: int,
    compress: Compress,
    storage_options: Mapping[str, Any] | None,
) -> dict[str, int]:
    """Return how much will at least be written to the folder of temporary files, and to that of the shards."""

    def known_bytes(url: str) -> int:
        try:
            return file_facts(url, storage_options=storage_options).bytes or 0
        except ShardError:  # which is told when it is read, or passed over
            return 0

    with ThreadPoolExecutor(ASKED_AT_ONCE) as asking:
        total = sum(asking.map(known_bytes, urls))
    needed = {folder: file_bytes(total, memory_bytes)}
    path = local_path(target % 0 if NUMBER.search(target) else target)
    if path is not None and compression_kind(compress, target) is None:
        place = Path(path).resolve()
        if not place.exists() or place.is_file():
            needed[str(place.parent)] = needed.get(str(place.parent), 0) + total
    return needed
