"""The command ``split``: write a dataset as shards of another size, or as parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from wds_datapipes.samples.keys import KeySplit
from wds_datapipes.tools.cli.copying import copy_samples, open_output, report_copied, written_by
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.read import Shards
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar, parse_pairs
from wds_datapipes.tools.cli.options.write import COPY, CopyArguments
from wds_datapipes.types import Sample
from wds_datapipes.writing.shard_names import NUMBER
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

#: The placeholder for the name of a part in --output.
PART = "{part}"


def split(
    *shards: Shards,
    output: Annotated[FileOrUrl, metavar("PATTERN", alias="-o")] = "split-%06d.tar",
    part: Annotated[list[str] | None, metavar("NAME=SHARE", alias="-p")] = None,
    seed: Annotated[int, metavar("NUMBER")] = 0,
    options: CopyArguments = COPY,
) -> None:
    """Split a dataset into shards of another size, into parts, or both.

    Samples are never split, and their data are copied unchanged. The part of a sample depends only on its key, so it
    does not change when samples are added or reordered. Shards appear under their names when they are complete.

    Args:
        output: The pattern of the shards, with a placeholder for the number, and {part} if there are
            parts.
        part: A part and its share, such as train=0.9; may be repeated.
        seed: The seed for assigning samples to parts.
    """
    shares = parse_shares(part or ())
    if bool(shares) is not (PART in output):
        raise WrongUse(
            "--part requires {part} in --output and vice versa, as in --part train=9 --part val=1 -o '{part}-%d.tar'"
        )
    if seed and not shares:
        raise WrongUse("--seed requires --part. It assigns samples to parts; without them, the order is kept")
    if not NUMBER.search(output):
        raise WrongUse(f"--output must have a placeholder for the number of the shard, such as %06d, unlike {output!r}")
    urls = options.list_shards(shards)
    writers = {name: open_output(output.replace(PART, name), urls, options) for name in shares or {"": 1.0}}
    key_split = KeySplit(shares or {"": 1.0}, seed=seed)

    def choose(sample: Sample) -> ShardWriter | TarWriter:
        return writers[key_split.assign(sample["__key__"])]

    faults = copy_samples(urls, writers.values(), choose, options, "Splitting")
    parts = {name: sum(info.samples for info in written_by(writer)) for name, writer in writers.items()}
    report_copied(writers.values(), urls, faults, options, facts={"parts": parts} if shares else {})


def parse_shares(parts: Sequence[str]) -> dict[str, float]:
    """Parse --part into a mapping of names to shares."""
    rule = "--part must be NAME=SHARE, with each NAME once and a positive SHARE, as in train=0.9"
    shares: dict[str, float] = {}
    for name, text in parse_pairs(parts, "[^=/%]+", rule).items():
        with suppress(ValueError):
            shares[name] = float(text)
        if not 0 < shares.get(name, 0) < float("inf"):
            raise WrongUse(f"{rule}, not {f'{name}={text}'!r}")
    return shares
