"""Does the cost of a sample grow with the number of samples, or the cost of a shard with the length of the list?

    python benchmarks/bench_growth.py --json growth.json --plot growth.png

Skipping: ``select_files`` selects only the last member of shards with 10,000 to 100,000 small ones. The time per
member should not depend on the number of earlier members, and skipped members should take no memory.

Long lists: 100,000 and 1,000,000 shards. Measures the time to create the list and yield its first URL, and the memory
per URL. Each measurement runs in a separate process.

Results: ours takes 1.3 µs per member and 0.7 MB, regardless of the number of members; webdataset takes 20 µs, and 4.5,
13.6 and 46.5 MB, because it keeps a record of each skipped member. Listing a million URLs takes 0.55 seconds, and 1.65
with webdataset, at about 110 bytes each.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import webdataset
from contest import in_child, options, parse, pyplot, write_report
from datasets import Fields, folder, write_shard
from memory import in_use, peak, reset_peak
from rich.console import Console
from rich.table import Table
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import ShardList

MEMBERS = (10_000, 30_000, 100_000)
LISTS = (100_000, 1_000_000)


class Skipping(NamedTuple):
    """The cost of reading one shard."""

    us_per_member: float
    peak_bytes: int


class Listing(NamedTuple):
    """The cost of a long list."""

    seconds: float
    bytes_per_url: float


def is_last(name: str) -> bool:
    return name.startswith("last")


def ours(url: str) -> Iterable[Any]:
    pipe: Iterable[Any] = ShardList(url).load_wds_shards(select_files=is_last).group_samples()
    return pipe


def theirs(url: str) -> Iterable[Any]:
    urls = webdataset.SimpleShardList([url])
    pipeline: Iterable[Any] = webdataset.DataPipeline(urls, tarfile_to_samples(select_files=is_last))
    return pipeline


READERS: dict[str, Callable[[str], Iterable[Any]]] = {"ours": ours, "webdataset": theirs}


def skip(reader: str, path: str, members: int) -> Skipping:
    """Read only the last sample of a shard, and return the time per member and the peak memory."""
    reset_peak()
    before = in_use()
    begin = time.perf_counter()
    keys = [sample["__key__"] for sample in READERS[reader](path)]
    elapsed = time.perf_counter() - begin
    if keys != ["last"]:
        raise AssertionError(f"{reader} yielded {keys} of {path}, not only the last sample")
    return Skipping(1e6 * elapsed / members, peak() - before)


def ours_list(urls: str) -> Iterator[str]:
    return iter(ShardList(urls))


def torch_list(urls: str) -> Iterator[str]:
    return iter(IterableWrapper(webdataset.shardlists.expand_urls(urls), deepcopy=False))


def theirs_list(urls: str) -> Iterator[Any]:
    return iter(webdataset.SimpleShardList(urls))


LISTERS: dict[str, Callable[[str], Iterator[Any]]] = {
    "ours": ours_list,
    "webdataset": theirs_list,
    "webdataset's expansion in torch's IterableWrapper": torch_list,
}


def list_shards(lister: str, shards: int) -> Listing:
    """Expand a pattern, and return the time to the first URL and the memory per URL."""
    gc.collect()
    before = in_use()
    begin = time.perf_counter()
    urls = LISTERS[lister](f"s3://bucket/data/train-{{0000000..{shards - 1:07d}}}.tar")
    next(urls)
    elapsed = time.perf_counter() - begin
    return Listing(elapsed, (in_use() - before) / shards)


def shard(data: Path, members: int) -> str:
    path = data / f"skip-{members}.tar"
    if not path.exists():
        data.mkdir(parents=True, exist_ok=True)
        keys = [*(f"{index:08d}" for index in range(1, members)), "last"]
        fields: Fields = {"txt": b"x" * 100}
        write_shard(path, ((key, fields) for key in keys))
    return str(path)


def main() -> None:
    arguments = parse(options(__doc__, rounds=3))
    scale = min(1.0, arguments.scale)
    sizes = [max(200, int(size * scale)) for size in MEMBERS]
    paths = [shard(folder(arguments.data), size) for size in sizes]
    skipped: dict[str, list[list[Skipping]]] = {reader: [[] for _ in sizes] for reader in READERS}
    listed: dict[str, list[list[Listing]]] = {lister: [[] for _ in LISTS] for lister in LISTERS}
    for _ in range(arguments.rounds):
        for column, (path, size) in enumerate(zip(paths, sizes, strict=True)):
            for reader, results in skipped.items():
                results[column].append(in_child(skip, reader, path, size))
        for column, length in enumerate(LISTS):
            for lister, lists in listed.items():
                lists[column].append(in_child(list_shards, lister, int(length * scale)))

    console = Console(width=110)
    table = Table(title="Skip all members but the last: µs per member, peak MB", title_justify="left")
    table.add_column("reader", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,} members", justify="right")
    for reader, results in skipped.items():
        table.add_row(reader, *(f"{_median(runs, 0):.2f} µs, {_median(runs, 1) / 1e6:,.1f} MB" for runs in results))
    console.print(table)
    table = Table(title="Long lists: seconds to the first URL, bytes per URL", title_justify="left")
    table.add_column("list", no_wrap=True)
    for length in LISTS:
        table.add_column(f"{int(length * scale):,} shards", justify="right")
    for lister, lists in listed.items():
        table.add_row(lister, *(f"{_median(runs, 0):.3f} s, {_median(runs, 1):,.0f} B" for runs in lists))
    console.print(table)
    write_report(arguments.json, {"members": sizes, "skipping": skipped, "shards": LISTS, "listing": listed})
    if arguments.plot:
        plot(arguments.plot, sizes, skipped)


def _median(runs: list[Any], column: int) -> float:
    return float(statistics.median(run[column] for run in runs))


def plot(path: Path, sizes: list[int], skipped: dict[str, list[list[Skipping]]]) -> None:
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for reader, results in skipped.items():
        panels[0].plot(sizes, [_median(runs, 0) for runs in results], marker="o", label=reader)
        panels[1].plot(sizes, [_median(runs, 1) / 1e6 for runs in results], marker="o", label=reader)
    for panel, label in zip(panels, ("µs per member", "peak MB"), strict=True):
        panel.set_xlabel("members in the shard, all but the last skipped")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
