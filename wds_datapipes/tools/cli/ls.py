"""The command ``ls``: list the samples of shards, their fields and sizes."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from wds_datapipes.index.format.shard_index import IndexedSample
from wds_datapipes.io.openers import redact
from wds_datapipes.tools.cli.errors import printable
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards
from wds_datapipes.tools.cli.options.values import Positive
from wds_datapipes.tools.cli.printing import end_with_faults, print_error, print_json, print_nothing_found
from wds_datapipes.tools.prepare.read_options import ReadOptions
from wds_datapipes.tools.prepare.shard_contents import ShardFault, read_contents


def ls(
    *shards: Shards, count: Annotated[Positive | None, Parameter(alias="-n")] = None, options: ReadArguments = READ
) -> None:
    """List the samples of shards with the sizes of their fields.

    Each line has the key, the total size, and each field with its size in bytes. Only headers are read if the shard
    supports range requests. For a truncated shard, the samples before the end are listed, then the error, and the exit
    code is 1.

    Args:
        count: List at most this many samples of each shard.
    """
    urls, samples, faults = options.list_shards(shards), 0, list[ShardFault]()
    for number, url in enumerate(urls):
        contents = read_contents(url, ReadOptions(**options.reading))
        samples += len(contents.samples)
        if options.json:
            for sample in contents.samples[:count]:
                facts = {"shard": redact(url), "key": sample.key, "offset": sample.offset, "fields": sample.fields}
                print_json(facts, indent=None)
        else:
            if len(urls) > 1:
                sys.stdout.write(f"{'' if number == 0 else chr(10)}{printable(redact(url))}:\n")
            print_samples(contents.samples[:count])
        for fault in contents.faults:
            print_error(fault.message)
        faults += contents.faults
    if not samples and not faults:
        print_nothing_found(len(urls))
    end_with_faults(faults, is_printed=False)


def print_samples(samples: list[IndexedSample]) -> None:
    """Print a line for each sample, with keys and total sizes in columns."""
    if not samples:
        return
    keys = [printable(sample.key) for sample in samples]
    wide, sums = max(map(len, keys)), max(len(str(sample.bytes)) for sample in samples)
    for key, sample in zip(keys, samples, strict=True):
        fields = "  ".join(f"{printable(field)} {size}" for field, size in sample.fields.items())
        sys.stdout.write(f"{key:{wide}}  {sample.bytes:{sums}}  {fields}\n")
