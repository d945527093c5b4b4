"""The command ``split``: shards of another size, or parts of a dataset, such as for training and for tests."""

from __future__ import annotations

from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import (
    Compression,
    MaxCount,
    MaxSize,
    Output,
    RemoveOld,
    SkipBad,
    WithIndex,
    check_outputs,
    copy_samples,
    report,
)
from wds_datapipes.cli._options import (
    AsJson,
    EndMarkerOption,
    KeyRuleOption,
    KeyRuleWord,
    Limits,
    Presence,
    Retries,
    Shards,
    StorageOptions,
    Timeout,
    key_rule_of,
    limits_of,
    list_shards,
    options_of,
    parse_bytes,
)
from wds_datapipes.prepare.split_by_key import KeySplit
from wds_datapipes.prepare.subset import Subset
from wds_datapipes.writing.shard_names import NUMBER

__all__ = ["split"]

#: The place of a part's name in the name of a shard.
PART = "{part}"


def split(
    shards: Shards,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="PATTERN",
            help="Where shards go, with a place for their numbers, and {part} if there are parts.",
        ),
    ] = "split-%06d.tar",
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", "-p", metavar="NAME=SHARE", help="A part, such as train=0.9; repeat it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one gives other parts.")] = 0,
    maxcount: MaxCount = 100_000,
    maxsize: MaxSize = "3GB",
    compress: Compression = None,
    index: WithIndex = False,
    remove_old: RemoveOld = False,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
    limits: Limits = None,
) -> None:
    """Write the samples of shards to shards of another size, or to parts of the dataset, or both.

    A sample is never cut, and its data are copied as they are. The part of a sample follows from its key alone: it
    stays the same when samples are added, or come in another order. Shards appear under their names when they are
    whole.
    """
    options, rule, bounds = options_of(storage_options, timeout, retries), key_rule_of(key_rule), limits_of(limits)
    size, shares = parse_bytes(maxsize, "--maxsize"), shares_of(parts or [])
    if bool(shares) is not (PART in output):
        raise WrongUse("Parts and {part} in --output go together, as in --part train=9 --part val=1 -o '{part}-%d.tar'")
    if not NUMBER.search(output):
        raise WrongUse(f"--output has a place for the numbers of shards, such as %06d, and {output!r} has none")
    urls = list_shards(shards, options)

    def make(on_error: object) -> Subset:
        return Subset(
            key_rule=rule,
            end_marker=end_marker.value,
            on_error=on_error,  # type: ignore[arg-type]  # a word or a function
            storage_options=options,
            limits=bounds,
        )

    outputs = {
        name: Output(
            output.replace(PART, name),
            maxcount=maxcount,
            maxsize=size,
            remove_old=remove_old,
            urls=urls,
            compress=compress,
            index=index,
            key_rule=rule,
            storage_options=options,
        )
        for name in shares or {"": 1.0}
    }
    assigned = KeySplit(shares or {"": 1.0}, seed=seed)
    faults = copy_samples(
        make,
        urls,
        outputs.values(),
        lambda sample: outputs[assigned.part_of(sample["__key__"])],
        skip_bad=skip_bad,
        label="Splitting",
        shown=True,
    )
    written = [info for out in outputs.values() for info in out.shards]
    told = {"parts": {name: sum(info.samples for info in out.shards) for name, out in outputs.items()}}
    report(written, faults, as_json=as_json, **(told if shares else {}))
    check_outputs(outputs.values(), urls)


def shares_of(parts: list[str]) -> dict[str, float]:
    """Return the names of parts and their shares."""
    shares: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not name or name in shares or "/" in name or "%" in name or not 0 < share < float("inf"):
            raise WrongUse(f"--part is NAME=SHARE, each NAME once and a SHARE above 0, as in train=0.9, not {part!r}")
        shares[name] = share
    return shares
