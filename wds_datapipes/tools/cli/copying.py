"""Copying of samples to an archive or to numbered shards, for the commands that change no data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from wds_datapipes.errors import EncodeError
from wds_datapipes.hints import REMOVE_OLD, Message
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.tools.cli.errors import FAULT_FOUND, WrongUse
from wds_datapipes.tools.cli.options.values import wrong_use
from wds_datapipes.tools.cli.options.write import CopyArguments
from wds_datapipes.tools.cli.printing import print_error, print_nothing_found, report_shards
from wds_datapipes.tools.prepare.read_options import ReadOptions
from wds_datapipes.tools.prepare.reorder import SampleEntries
from wds_datapipes.tools.prepare.subset import Subset, check_rekey
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, find_overwritten
from wds_datapipes.writing.shard_writer import OldShards, ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter


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
        print_error(Message(f"{describe_old_shards(old)}. Remove them, or ", REMOVE_OLD))
    if left:
        raise SystemExit(FAULT_FOUND)


def reorder(
    shards: Sequence[str], order: Callable[[SampleEntries], object], output: str, rekey: str, options: CopyArguments
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
