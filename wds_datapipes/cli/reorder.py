"""The commands ``shuffle`` and ``sort``: write all samples of a dataset in another order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from wds_datapipes.cli._declaration import Natural
from wds_datapipes.cli._options import wrong_use
from wds_datapipes.cli.copy import CopyArguments, open_output, report_copied
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.prepare.reorder import FieldSortKey, SampleEntries
from wds_datapipes.prepare.subset import check_rekey


def shuffle(
    shards: list[str],
    options: CopyArguments,
    output: str = "shuffle-%06d.tar",
    seed: Natural = 0,
    rekey: str = "",
) -> None:
    """Shuffle all samples of a dataset uniformly.

    Keeps the offsets of all samples in memory, and reads each sample by its offset, so shards must be uncompressed and
    support random access. The order depends only on the seed and the order of the input. Data are copied unchanged.

    Options:
        --output, -o TARGET: The output: shards with a placeholder for the number, or one archive, as for cat.
        --seed NUMBER: The seed of the order.
    """
    reorder(shards, lambda entries: entries.shuffle(seed), output, rekey, options)


def sort(
    shards: list[str],
    options: CopyArguments,
    output: str = "sort-%06d.tar",
    by: str = "key",
    numeric: bool = False,
    reverse: bool = False,
    rekey: str = "",
) -> None:
    """Sort all samples of a dataset by key or by the value of a field.

    Keeps the offsets of all samples in memory, and reads each sample by its offset, so shards must be uncompressed and
    support random access. The sort is stable, text is compared by code points, and data are copied unchanged.

    Options:
        --output, -o TARGET: The output: shards with a placeholder for the number, or one archive, as for cat.
        --by FIELD: A field, or key for the key.
        --numeric: Compare text as numbers.
        --reverse: Sort in descending order, stably.
    """
    with wrong_use("--by: "):
        key = FieldSortKey(by, numeric=numeric, reverse=reverse)
    reorder(shards, lambda entries: entries.sort(key), output, rekey, options)


def reorder(
    shards: list[str], order: Callable[[SampleEntries], object], output: str, rekey: str, options: CopyArguments
) -> None:
    """Write the samples of shards in another order, and report the result.

    Args:
        shards: patterns of the shards.
        order: reorders the entries.
        output: the target, as for `open_output`.
        rekey: a pattern for new keys.
        options: the options of the command.
    """
    with wrong_use():
        check_rekey(rekey or "{key}")
    urls = options.list_shards(shards)
    faults: list[Exception] = []
    shown = output != "-"
    with open_output(output, urls, options) as writer:
        entries = SampleEntries(
            urls,
            rekey=rekey,
            on_fault=faults.append if options.skips else None,
            progress=shown,
            **options.reading,
        )
        order(entries)
        with closing(entries), ProgressMeter("Copying", len(entries), shown=shown, unit="samples") as meter:
            for sample in entries.read():
                writer.write(sample)
                meter.add(samples=1, size=sum(len(value) for value in sample.values() if type(value) is bytes))
    report_copied([writer], urls, faults, options, shown=shown)
