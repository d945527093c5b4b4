"""The command ``shuffle``: shuffle all samples of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Annotated

import typer

from wds_datapipes.cli._copy import CopyOptions, Output, Rekey, check_outputs, make_subset, report, with_option_hint
from wds_datapipes.cli._options import Shards
from wds_datapipes.errors import EncodeError
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.prepare.reorder import SampleEntries

__all__ = ["reorder", "shuffle"]


def shuffle(
    shards: Shards,
    options: CopyOptions,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="The output: shards with a placeholder for the number, or one archive, as for cat.",
        ),
    ] = "shuffle-%06d.tar",
    seed: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="The seed of the order.")] = 0,
    rekey: Rekey = "",
) -> None:
    """Shuffle all samples of a dataset uniformly.

    Keeps the offsets of all samples in memory, and reads each sample by its offset, so shards must be uncompressed and
    support random access. The order depends only on the seed and the order of the input. Data are copied unchanged.
    """
    reorder(shards, lambda entries: entries.shuffle(seed), output, rekey, options)


def reorder(
    shards: list[str], order: Callable[[SampleEntries], object], target: str, rekey: str, options: CopyOptions
) -> None:
    """Write the samples of shards in another order, and report the result.

    Args:
        shards: patterns of the shards.
        order: reorders the entries.
        target: the output, as for `Output`.
        rekey: a pattern for new keys.
        options: the options of the command.
    """
    make_subset(rekey=rekey)
    urls = options.list_shards(shards)
    faults: list[Exception] = []
    shown = target != "-"
    with Output(target, urls, options) as output:
        try:
            entries = SampleEntries(
                urls,
                rekey=rekey,
                on_fault=faults.append if options.skip_bad else None,
                progress=shown,
                **options.reading,
            )
        except EncodeError as error:
            raise with_option_hint(error) from None
        order(entries)
        with closing(entries), ProgressMeter("Copying", len(entries), shown=shown, unit="samples") as meter:
            for sample in entries.read():
                output.write(sample)
                meter.add(samples=1, size=sum(len(value) for value in sample.values() if type(value) is bytes))
    report(output.shards if shown else [], faults, as_json=options.as_json)
    check_outputs([output], urls)
