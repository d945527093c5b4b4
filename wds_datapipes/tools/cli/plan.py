"""The command ``plan``: what each host of a run reads and holds, before the run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from wds_datapipes.errors import StaleSidecarError, plural
from wds_datapipes.index.format.index_lookup import indexed_shards
from wds_datapipes.index.format.manifest import Manifest, read_manifest
from wds_datapipes.index.format.options import HELD_BYTES, AccessOptions, EpochOptions, Pack
from wds_datapipes.index.order.batch_share import Remainder
from wds_datapipes.index.order.sample_order import Order
from wds_datapipes.io.compression.formats import strip_shard_suffix
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.seeds import derived_seed
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.read import STORE, StoreArguments
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar, parse_bytes, parse_pairs, wrong_use
from wds_datapipes.tools.cli.printing import print_json, print_table
from wds_datapipes.tools.plan.figures import FIGURES, draw, row_of
from wds_datapipes.tools.plan.training_run import RunPlan, RunShape, plan_run

RUN, ORDER = Group("Run", sort_key=6), Group("Order", sort_key=7)
#: Patterns of shards have such characters.
WILD = re.compile(r"[{*?\[]|/$")
#: What ``--compare`` can vary.
COMPARED = ("lanes", "window_shards", "open_shards", "read_ahead", "cache_bytes", "hosts", "num_workers", "order")


def bytes_of(text: str) -> int | None:
    """Return a number of bytes; None stands for no cache."""
    return int(parse_bytes(text, "--cache-bytes")) if text != "none" else None


def convert_bytes(_: object, tokens: Sequence[Token]) -> int | None:
    """Convert the value of an option."""
    return bytes_of(tokens[0].value)


@Parameter(name="*", group=RUN)
@dataclass(frozen=True, kw_only=True)
class RunArguments(RunShape):
    """The options that describe a run.

    Args:
        hosts: The number of hosts.
        ranks_per_host: The number of ranks, such as GPUs, of each host.
        num_workers: The number of workers of each rank.
        global_batch_size: The number of samples in a batch of all ranks together.
        epochs: The number of epochs.
        steps_per_s: The number of steps per second.
        seed: The seed of the run.
        order: The order of the samples.
        lanes: The number of lanes.
        window_shards: The number of shards shuffled together.
        remainder: What to do with the samples after the last whole batch.
        open_shards: The maximum number of shards that a process keeps open.
        read_ahead: The size of the samples that a process reads ahead, such as 128MB.
        cache_bytes: The space for copies on each host, such as 4TB; without it, there is no cache.
    """

    order: Annotated[Order, Parameter(group=ORDER)] = "window"
    lanes: Annotated[int, Parameter(group=ORDER)] = 1
    window_shards: Annotated[int, Parameter(group=ORDER)] = 16
    remainder: Annotated[Remainder, Parameter(group=ORDER)] = "drop"
    open_shards: Annotated[int, Parameter(group=ORDER)] = 128
    read_ahead: Annotated[int, metavar("BYTES", converter=convert_bytes, group=ORDER)] = HELD_BYTES
    cache_bytes: Annotated[int | None, metavar("BYTES", converter=convert_bytes, group=ORDER)] = None


def plan(
    *dataset: Annotated[FileOrUrl, Parameter(required=True)],
    options: RunArguments,
    compare: Annotated[list[str] | None, metavar("NAME=VALUES")] = None,
    plot: Annotated[FileOrUrl | None, metavar("FILE")] = None,
    pack: Annotated[str | None, metavar("NAME=VALUE,...")] = None,
    price: Annotated[float, metavar("DOLLARS")] = 0.4,
    index_dir: Annotated[FileOrUrl | None, metavar("DIR")] = None,
    json: bool = False,
    stores: StoreArguments = STORE,
) -> None:
    """Print what each host of a run reads and holds.

    Also warns which arguments to change. Orders the samples of the first host as IndexedSamples does, and reads only
    the manifest, or the indexes of the shards.

    Args:
        dataset: The manifest of the dataset, written by `index --manifest`; or paths, URLs or patterns of shards that
            have indexes, such as 'train-{000..099}.tar'.
        compare: Compare plans in a table, such as lanes=1,64,512; may be repeated, for all combinations.
        plot: Draw the figures of --compare, as PNG, SVG or PDF; needs the extra "plot".
        pack: Instead, print the rows that an epoch packs: their padding, their balance, and steps, in which
            --global-batch-size counts rows. For example length=tokens,row=8192, where tokens is a column of the
            indexes; also cost=COLUMN, second=COLUMN:LIMIT, window=SAMPLES, balance=similar, long_samples=split.
        price: The price of a million requests to the store.
        index_dir: The folder of the indexes, if not next to their shards.
        json: Print the facts as JSON.
    """
    if plot and not compare:
        raise WrongUse("--plot requires --compare, whose plans it draws")
    if pack is not None and compare:
        raise WrongUse("--pack prints the rows of one plan, so it excludes --compare")
    manifest = find_manifest(dataset, stores, index_dir)
    if not compare and options.global_batch_size % options.ranks:
        hosts = f"--hosts {options.hosts}, --ranks-per-host {options.ranks_per_host}"
        raise WrongUse(
            f"--global-batch-size {options.global_batch_size} is not divisible by the {plural(options.ranks, 'rank')} "
            f"of this run ({hosts}). Choose other numbers"
        )
    if pack is not None:
        access = AccessOptions(index_dir=index_dir, indexes="require", storage_options=stores.store)
        print_rows(manifest, options, parse_pack(pack), access, json=json)
        return
    shapes = list(variants(options, compare or ()))
    with wrong_use():
        plans = [plan_run(manifest, shape) for shape, _ in shapes]
    names = [" ".join(f"{name}={value}" for name, value in varied.items()) for _, varied in shapes]
    if json:
        print_json([{**asdict(shape), **asdict(each)} for (shape, _), each in zip(shapes, plans, strict=True)])
    elif compare:
        print_table([("", *FIGURES.values()), *(row_of(name, each) for name, each in zip(names, plans, strict=True))])
    else:
        print_plan(options, plans[0], price)
    if plot:
        try:
            draw(plot, names, plans)
        except (OSError, ValueError) as error:
            raise WrongUse(f"--plot {plot}: {error}") from None
    for name, each in zip(names, plans, strict=True):
        for warning in each.warnings if not json else ():
            sys.stdout.write(f"Warning: {name}{': ' if name else ''}{warning}\n")


def find_manifest(dataset: Sequence[str], stores: StoreArguments, index_dir: str | None) -> Manifest:
    """Return the manifest of a dataset, or one of its indexes if shards are named.

    Raises:
        MissingSidecarError: there is no such manifest.
        ShardOpenError: there is no such shard.
        StaleSidecarError: a shard has no valid index.
    """
    name = dataset[0]
    if len(dataset) == 1 and strip_shard_suffix(name) == name and not WILD.search(name) and not Path(name).is_dir():
        return read_manifest(name, storage_options=stores.store)
    access = AccessOptions(index_dir=index_dir, indexes="require", storage_options=stores.store)
    try:
        return Manifest(indexed_shards(stores.list_shards(dataset), access))
    except StaleSidecarError as error:
        raise StaleSidecarError(f"{error}, or name the manifest that `index --manifest` has written") from None


def parse_pack(text: str) -> Pack:
    """Parse --pack.

    >>> parse_pack("length=tokens,row=8192,second=images:16").second
    ('images', 16)

    Raises:
        WrongUse: it is not a list of arguments of `Pack`.
    """
    names = [each.name for each in fields(Pack)]
    rule = f"--pack must be NAME=VALUE,... with the names {', '.join(names)}, such as length=tokens,row=8192"
    pairs: dict[str, Any] = dict(parse_pairs(text.split(","), "|".join(names), rule))
    if missing := {"length", "row"} - pairs.keys():
        raise WrongUse(f"--pack lacks {min(missing)}=: {rule}")
    with wrong_use("--pack: "):
        pairs |= {name: _integer(name, pairs[name]) for name in ("row", "window") if name in pairs}
        if "second" in pairs:
            column, _, limit = pairs["second"].rpartition(":")
            if not column:
                raise WrongUse(f"--pack: second must be COLUMN:LIMIT, such as images:16, not {limit!r}")
            pairs["second"] = column, _integer("the limit of second", limit)
        return Pack(**pairs)


def _integer(name: str, text: str) -> int:
    if not text.isdecimal():
        raise WrongUse(f"--pack: {name} must be an integer, such as 8192, not {text!r}")
    return int(text)


def print_rows(manifest: Manifest, shape: RunShape, pack: Pack, access: AccessOptions, *, json: bool) -> None:
    """Print the figures of packed rows."""
    from wds_datapipes.pipes.samples.indexed_samples import IndexedSamples  # these import torch
    from wds_datapipes.tools.plan.planned_rows import plan_rows

    with wrong_use("", KeyError):
        samples = IndexedSamples(
            manifest,
            order=shape.order,
            global_batch_size=shape.global_batch_size,
            lanes=shape.lanes,
            remainder=shape.remainder,
            epoch=EpochOptions(pack=pack, window_shards=shape.window_shards),
            access=access,
        )
        found = plan_rows(samples.set_seed(derived_seed("epoch", shape.seed, 0)), shape.ranks)
    if json:
        print_json(asdict(found))
        return
    rows = [
        ("samples of an epoch", f"{found.samples:,}"),
        ("rows", f"{found.rows:,}"),
        ("samples per row", f"{found.samples_per_row:,.4g}"),
        ("padding of a row", f"{found.padding:.2%}"),
        ("steps of an epoch", f"{found.steps:,}"),
        ("rows of a rank in a step", f"{shape.global_batch_size // shape.ranks:,}"),
        ("rows that an epoch drops, or adds empty", f"{found.dropped:,}, {found.padded:,}"),
        ("busiest rank of a step over the mean", f"{found.busiest[0]:.3f}"),
        ("the same in the worst step", f"{found.busiest[1]:.3f}"),
        ("likeness of the rows of a step", f"{found.likeness:.2f}"),
    ]
    print_table(rows)
    sys.stdout.write(f"{plural(len(found.warnings), 'warning')}\n")
    for warning in found.warnings:
        sys.stdout.write(f"Warning: {warning}\n")


def variants(shape: RunShape, compare: Sequence[str]) -> list[tuple[RunShape, dict[str, str]]]:
    """Return the shapes to compare and the values in which they differ."""
    rule = f"--compare must be NAME=VALUES with one of the names {', '.join(COMPARED)}, each once"
    pairs = parse_pairs(
        [each.replace("-", "_", each.partition("=")[0].count("-")) for each in compare], "|".join(COMPARED), rule
    )
    found = []
    parsers: dict[str, Callable[[str], Any]] = {"cache_bytes": bytes_of, "read_ahead": bytes_of, "order": str}
    for values in product(*(text.split(",") for text in pairs.values())):
        varied = dict(zip(pairs, values, strict=True))
        with wrong_use("--compare: "):
            parsed: dict[str, Any] = {name: parsers.get(name, int)(value) for name, value in varied.items()}
            found.append((replace(shape, **parsed), varied))
    return found


def print_plan(shape: RunShape, found: RunPlan, price: float) -> None:
    """Print the figures of a plan."""
    requests = found.requests_per_s / shape.steps_per_s * found.steps
    rows = [
        ("ranks, workers", f"{shape.ranks:,}, {shape.ranks * shape.num_workers:,}"),
        ("steps of an epoch", f"{found.steps:,}"),
        ("samples that an epoch drops or repeats", f"{found.unread:,}"),
        ("idle workers of a rank", f"{found.idle_workers:,}"),
        ("shards of a batch", f"{found.shards_per_batch:,}"),
        ("shards of a host, in an epoch", f"{found.shards_per_host[0]:,}"),
        ("shards of a host, in all epochs", f"{found.shards_per_host[1]:,}"),
        ("samples for each shard opened", f"{1 / found.opens_per_sample:,.4g}" if found.opens_per_sample else "-"),
        ("requests per sample, without a cache", f"{found.requests_per_sample:.4g}"),
        ("requests per second, without a cache", f"{found.requests_per_s:,.0f}"),
        ("requests of an epoch, without a cache", f"{requests:,.0f}, {requests / 1e6 * price:,.2f} dollars"),
        *(
            (f"bytes to a host in epoch {epoch}", human_bytes(size))
            for epoch, size in enumerate(found.bytes_per_epoch, 1)
        ),
        *((f"hits in epoch {epoch}", f"{rate:.1%}") for epoch, rate in enumerate(found.hit_rates, 1)),
        ("copies of all shards of a host", human_bytes(found.cache_bytes)),
        ("memory of a worker for reading", human_bytes(found.worker_bytes)),
    ]
    print_table(rows)
    sys.stdout.write(f"{plural(len(found.warnings), 'warning')}\n")
