"""The commands ``cat``, ``split``, ``shuffle`` and ``sort``, which copy samples unchanged."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

from wds_datapipes.errors import EncodeError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.samples.fields import Lacking
from wds_datapipes.samples.keys import KeySplit
from wds_datapipes.tools.cli.docstring_options import Natural, Positive
from wds_datapipes.tools.cli.printing import print_error, print_nothing_found, report_shards
from wds_datapipes.tools.cli.program import FAULT_FOUND, WrongUse
from wds_datapipes.tools.cli.shared_options import ReadArguments, parse_bytes, parse_pairs, wrong_use
from wds_datapipes.tools.prepare.read_options import ReadOptions
from wds_datapipes.tools.prepare.reorder import FieldSortKey, SampleEntries
from wds_datapipes.tools.prepare.subset import Subset, check_rekey
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_file import TarWriter
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, find_overwritten
from wds_datapipes.writing.shard_writer import OldShards, ShardWriter

#: The placeholder for the name of a part in --output.
PART = "{part}"


@dataclass(frozen=True, kw_only=True)
class WriteArguments:
    """The options of all commands that write numbered shards.

    Writing:
        --maxcount NUMBER: The maximum number of samples in a numbered shard, by default 100,000.
        --maxsize BYTES: The maximum size of a numbered shard, such as 500MB or 2GiB, by default 3GB.
        --compress KIND: gz, bz2, xz or zst; by default, the file name decides.
        --index: Write an index next to each shard, as the command index does.
        --remove-old: Remove surplus shards of an earlier, larger run.
        --on-error: Whether to stop at bad samples, or to skip and report them and the rest of bad shards.
    """

    maxcount: Positive | None = None
    maxsize: str = ""
    compress: str | None = None
    index: bool = False
    remove_old: bool = False
    on_error: Literal["raise", "skip"] = "raise"

    def limits_of(self, output: str) -> dict[str, Any]:
        """Return the limits of the shards of an output, after checking that options for numbered shards apply."""
        limits = {"maxcount": self.maxcount or 100_000, "maxsize": parse_bytes(self.maxsize or "3GB", "--maxsize")}
        given = {"--maxcount": self.maxcount, "--maxsize": self.maxsize, "--remove-old": self.remove_old}
        if (ignored := [name for name, value in given.items() if value]) and not NUMBER.search(output):
            raise WrongUse(
                f"{' and '.join(ignored)} cannot be used with one archive, which is what --output {redact(output)!r} "
                "names. Name numbered shards, as in --output out-%06d.tar"
            )
        return limits

    def skip_into(self, faults: list[Exception]) -> Callable[[Exception], bool]:
        """Return a handler that adds errors to a list if ``on_error`` is ``"skip"``, and raises them otherwise."""

        def skip(error: Exception) -> bool:
            if self.on_error == "raise":
                raise error
            faults.append(error)
            return True

        return skip


@dataclass(frozen=True, kw_only=True)
class CopyArguments(WriteArguments, ReadArguments):
    """The options of all commands that copy samples unchanged.

    Writing:
        --rekey PATTERN: The pattern of new keys, with {number}, {key}, {name} and {shard}, such as '{number:08d}'.
    """


def cat(
    shards: list[str],
    options: CopyArguments,
    output: str = "-",
    select: list[str] | None = None,
    missing: Lacking = "raise",
    slice_: str = "",
    rename: list[str] | None = None,
    rekey: str = "",
) -> None:
    """Copy samples in order to an archive, numbered shards or a pipe.

    The data of fields are copied unchanged. --slice is applied first, then --select, --rename and --rekey.
    Field names become lower case, and files that belong to no sample are dropped. The output appears under its name
    when it is complete and may be one of the inputs.

    Selection:
        --select FIELD: Copy only matching fields, such as 'jpg;png'; may be repeated.
        --missing: How to handle a sample without a selected field.
        --slice START:STOP[:STEP]: Copy only samples at these positions, counted from 0.

    Output:
        --output, -o TARGET: A file, a URL, 'pipe:COMMAND', or - for standard output; with %06d in its name, numbered
            shards.
        --rename, -r NEW=OLD: Rename a field; may be repeated.
    """
    new_names = "--rename must be NEW=OLD, with each NEW once and in lower case, as in 'png=image.png'"
    taken: dict[str, Any] = {
        "positions": parse_slice_text(slice_),
        "select": select or (),
        "missing": missing,
        "rename": parse_pairs(rename or (), "[^=/A-Z]+", new_names),
        "rekey": rekey,
    }
    with wrong_use():
        Subset(**taken)  # rejects invalid options before anything is opened
    if missing != "raise" and not select:
        raise WrongUse("--missing requires --select, whose fields a sample may lack")
    urls = options.list_shards(shards)
    writer = open_output(output, urls, options)
    faults = copy_samples(urls, [writer], lambda _: writer, options, "Copying", shown=output != "-", **taken)
    report_copied([writer], urls, faults, options, shown=output != "-")


def split(
    shards: list[str],
    options: CopyArguments,
    output: str = "split-%06d.tar",
    part: list[str] | None = None,
    seed: int = 0,
) -> None:
    """Split a dataset into shards of another size, into parts, or both.

    Samples are never split, and their data are copied unchanged. The part of a sample depends only on its key, so it
    does not change when samples are added or reordered. Shards appear under their names when they are complete.

    Options:
        --output, -o PATTERN: The pattern of the shards, with a placeholder for the number, and {part} if there are
            parts.
        --part, -p NAME=SHARE: A part and its share, such as train=0.9; may be repeated.
        --seed NUMBER: The seed for assigning samples to parts.
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


def open_output(target: str, urls: list[str], options: CopyArguments) -> ShardWriter | TarWriter:
    """Open one archive, or numbered shards if the name contains ``%06d`` or the like.

    Args:
        target: a path or URL, ``pipe:COMMAND`` or ``-``.
        urls: the source shards, which numbered shards must not replace: some would be lost before they are read, or if
            a later one cannot be written.
        options: the options of the command.
    """
    if target == "-" and options.json:
        raise WrongUse("--json and the archive cannot both go to standard output. Name a file with --output")
    if target == "-" and sys.stdout.isatty():
        raise WrongUse("An archive cannot be written to a terminal. Name a file with --output, or write to a pipe")
    limits = options.limits_of(target)
    with wrong_use("", TypeError):
        writing = WriteOptions(
            encoder=False,
            compress=options.compress,  # type: ignore[arg-type]  # it is checked
            index=options.index,
            key_rule=options.rule,
            storage_options=options.store,
        )
        if not NUMBER.search(target):
            return TarWriter(target, writing)
    if (read := find_overwritten(target, urls)) is not None:
        raise WrongUse(
            f"{redact(target)!r} may overwrite {redact(read)!r}, which is an input. Choose another name or folder for "
            f"--output"
        )
    old_shards: OldShards = "remove" if options.remove_old else "keep"
    with wrong_use("", TypeError):
        return ShardWriter(target, **limits, verbose=False, old_shards=old_shards, options=writing)


def written_by(writer: ShardWriter | TarWriter) -> list[ShardInfo]:
    """Return the complete shards of a writer."""
    if isinstance(writer, ShardWriter):
        return writer.shards
    return [] if writer.info is None else [writer.info]


def copy_samples(
    urls: list[str],
    writers: Collection[ShardWriter | TarWriter],
    choose: Callable[[Sample], ShardWriter | TarWriter],
    options: CopyArguments,
    label: str,
    *,
    shown: bool = True,
    **taken: Any,
) -> list[Exception]:
    """Copy samples of shards and return the skipped errors.

    Args:
        urls: the shards to read.
        writers: the possible outputs. They are finished at the end, or discarded on an error or Ctrl-C.
        choose: returns the output for a sample.
        options: the options of the command.
        label: the label of the progress bar.
        shown: whether a progress bar may be shown.
        **taken: the part of the shards to copy, as for `Subset`.
    """
    faults: list[Exception] = []
    skip = options.skip_into(faults)
    with ExitStack() as opened, ProgressMeter(label, len(urls), shown=shown) as meter:
        for writer in writers:
            opened.enter_context(writer)

        def count_shards() -> Iterator[str]:
            for url in urls:
                yield url
                meter.add(shards=1)

        for sample in Subset(on_error=skip, **options.reading, **taken).samples(count_shards()):
            try:
                choose(sample).write(sample)
            except EncodeError as error:
                skip(error)
            meter.add(samples=1, size=sum(len(v) for v in sample.values() if type(v) is bytes))
    return faults


def report_copied(
    writers: Collection[ShardWriter | TarWriter],
    urls: Sequence[str],
    faults: Sequence[Exception],
    options: CopyArguments,
    *,
    shown: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Report what was written and skipped; fail if shards of an earlier run remain among the new ones."""
    shards = [info for writer in writers for info in written_by(writer)]
    report_shards(shards if shown else [], faults, as_json=options.json, facts=facts or {})
    if not any(info.samples for info in shards):
        print_nothing_found(len(urls), "sample to write")
    left = [writer.old_shards for writer in writers if isinstance(writer, ShardWriter) and writer.old_shards]
    for old in left:
        print_error(f"{describe_old_shards(old)}. Remove them, or use --remove-old")
    if left:
        raise SystemExit(FAULT_FOUND)


def parse_slice_text(text: str) -> tuple[int | None, ...]:
    """Return the start, stop and step of a slice.

    >>> parse_slice_text("10:20"), parse_slice_text(":100:2"), parse_slice_text("5:")
    ((10, 20), (None, 100, 2), (5, None))
    """
    if text and not re.fullmatch(r"\d*:\d*(:(0*[1-9]\d*)?)?", text):
        raise WrongUse(f"--slice must be START:STOP or START:STOP:STEP, counted from 0, as in 10:20, not {text!r}")
    return tuple(int(word) if word else None for word in text.split(":")) if text else ()


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


def shuffle(
    shards: list[str], options: CopyArguments, output: str = "shuffle-%06d.tar", seed: Natural = 0, rekey: str = ""
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
    """Sort all samples of a dataset by key or by a field.

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
    """Write the samples of shards in another order and report the result.

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
        scan, skip = ReadOptions(**options.reading), options.skip_into(faults)
        entries = SampleEntries(urls, rekey=rekey, on_fault=skip, progress=shown, scan=scan)
        order(entries)
        with ProgressMeter("Copying", len(entries), shown=shown, unit="samples") as meter:
            for sample in entries.read():
                writer.write(sample)
                meter.add(samples=1, size=sum(len(value) for value in sample.values() if type(value) is bytes))
    report_copied([writer], urls, faults, options, shown=shown)
