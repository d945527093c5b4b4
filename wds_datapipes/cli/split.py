"""The command ``split``: split a dataset into shards of another size, or into parts such as train and val."""

from __future__ import annotations

from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import CopyOptions, Output, check_outputs, copy_samples, report
from wds_datapipes.cli._options import Shards
from wds_datapipes.samples.key_split import KeySplit
from wds_datapipes.writing.shard_names import NUMBER

__all__ = ["split"]

#: The placeholder for the name of a part in --output.
PART = "{part}"


def split(
    shards: Shards,
    options: CopyOptions,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="PATTERN",
            help="The pattern of the shards, with a placeholder for the number, and {part} if there are parts.",
        ),
    ] = "split-%06d.tar",
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part", "-p", metavar="NAME=SHARE", help="A part and its share, such as train=0.9; may be repeated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="The seed for assigning samples to parts.")] = 0,
) -> None:
    """Copy samples to shards of another size, to parts of the dataset, or both.

    Samples are never split, and their data are copied unchanged. The part of a sample depends only on its key, so it
    does not change when samples are added or reordered. Shards appear under their names when they are complete.
    """
    shares = parse_shares(parts or [])
    if bool(shares) is not (PART in output):
        raise WrongUse(
            "--part requires {part} in --output and vice versa, as in --part train=9 --part val=1 -o '{part}-%d.tar'"
        )
    if not NUMBER.search(output):
        raise WrongUse(f"--output must have a placeholder for the number of the shard, such as %06d, unlike {output!r}")
    urls = options.list_shards(shards)
    outputs = {name: Output(output.replace(PART, name), urls, options) for name in shares or {"": 1.0}}
    key_split = KeySplit(shares or {"": 1.0}, seed=seed)
    faults = copy_samples(
        urls,
        outputs.values(),
        lambda sample: outputs[key_split.assign(sample["__key__"])],
        options,
        label="Splitting",
    )
    written = [info for out in outputs.values() for info in out.shards]
    facts = {"parts": {name: sum(info.samples for info in out.shards) for name, out in outputs.items()}}
    report(written, faults, as_json=options.as_json, **(facts if shares else {}))
    check_outputs(outputs.values(), urls)


def parse_shares(parts: list[str]) -> dict[str, float]:
    """Parse --part into a mapping of names to shares."""
    shares: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not name or name in shares or "/" in name or "%" in name or not 0 < share < float("inf"):
            raise WrongUse(
                f"--part must be NAME=SHARE, with each NAME once and a positive SHARE, as in train=0.9, not {part!r}"
            )
        shares[name] = share
    return shares
