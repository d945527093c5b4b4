"""Does it cost more to read a sample after many others, or one shard of a long list?

    python benchmarks/bench_growth.py --json growth.json --plot growth.png

Skipping: shards of 10,000 to 100,000 small members, of which ``select_files`` takes the last one only. The time for a
member should not depend on how many came before it, and no memory should be kept for those that were refused.

Long lists: 100,000 and 1,000,000 shards. The seconds until the list exists and its first URL has come, and the memory
that a URL takes. Each is measured in a process of its own.

Measured: ours takes 1.3 µs and 0.7 MB whatever the number of members; webdataset 20 µs and 4.5, 13.6 and 46.5 MB, since
it keeps a record of each member that it skips. A million URLs are listed in 0.55 seconds, webdataset's in 1.65, at some
110 bytes each.
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
from memory import in_use, peak, restart_peak
from rich.console import Console
from rich.table import Table
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import ShardList

MEMBERS = (10_000, 30_000, 100_000)
LISTS = (100_000, 1_000_000)


class Skipping(NamedTuple):
    """What reading one shard took."""

    us_per_member: float
    peak_bytes: int


class Listing(NamedTuple):
    """What a long list took."""

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
    """Read the last sample of a shard, and tell how much memory that took at the most."""
    restart_peak()
    before = in_use()
    begin = time.perf_counter()
    keys = [sample["__key__"] for sample in READERS[reader](path)]
    lasted = time.perf_counter() - begin
    if keys != ["last"]:
        raise AssertionError(f"{reader} yielded {keys} of {path}, where only the last sample was to be read")
    return Skipping(1e6 * lasted / members, peak() - before)


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


def enlist(lister: str, shards: int) -> Listing:
    """Expand a pattern and take the first URL."""
    gc.collect()
    before = in_use()
    begin = time.perf_counter()
    urls = LISTERS[lister](f"s3://bucket/data/train-{{0000000..{shards - 1:07d}}}.tar")
    next(urls)
    lasted = time.perf_counter() - begin
    return Listing(lasted, (in_use() - before) / shards)


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
                lists[column].append(in_child(enlist, lister, int(length * scale)))

    console = Console(width=110)
    table = Table(title="Skip all members but the last: µs a member, MB at the peak", title_justify="left")
    table.add_column("reader", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,} members", justify="right")
    for reader, results in skipped.items():
        table.add_row(reader, *(f"{_middle(runs, 0):.2f} µs, {_middle(runs, 1) / 1e6:,.1f} MB" for runs in results))
    console.print(table)
    table = Table(title="Long lists: seconds to the first URL, bytes a URL", title_justify="left")
    table.add_column("list", no_wrap=True)
    for length in LISTS:
        table.add_column(f"{int(length * scale):,} shards", justify="right")
    for lister, lists in listed.items():
        table.add_row(lister, *(f"{_middle(runs, 0):.3f} s, {_middle(runs, 1):,.0f} B" for runs in lists))
    console.print(table)
    write_report(arguments.json, {"members": sizes, "skipping": skipped, "shards": LISTS, "listing": listed})
    if arguments.plot:
        plot(arguments.plot, sizes, skipped)


def _middle(runs: list[Any], which: int) -> float:
    return float(statistics.median(run[which] for run in runs))


def plot(path: Path, sizes: list[int], skipped: dict[str, list[list[Skipping]]]) -> None:
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for reader, results in skipped.items():
        panels[0].plot(sizes, [_middle(runs, 0) for runs in results], marker="o", label=reader)
        panels[1].plot(sizes, [_middle(runs, 1) / 1e6 for runs in results], marker="o", label=reader)
    for panel, label in zip(panels, ("µs a member", "MB at the peak"), strict=True):
        panel.set_xlabel("members in the shard, all but the last refused")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
