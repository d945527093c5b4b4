"""Copy samples unchanged to archives, shards and commands, for ``cat`` and ``split``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, has_options, on_one_line, printable, say_nothing_found
from wds_datapipes.cli._meter import plural
from wds_datapipes.cli._options import LimitedOptions, parse_bytes
from wds_datapipes.errors import EncodeError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import ProgressMeter, human_bytes
from wds_datapipes.prepare.subset import Subset
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, find_overwritten
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Compression",
    "CopyOptions",
    "Output",
    "Rekey",
    "RemoveOld",
    "WriterOptions",
    "check_outputs",
    "copy_samples",
    "make_subset",
    "parse_slice_text",
    "print_skipped",
    "report",
    "with_option_hint",
]

#: The number of skipped errors shown.
SHOWN = 10

Compression: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--compress", metavar="KIND", help="gz, bz2, xz or zst; by default, the file name decides.", show_default=False
    ),
]
RemoveOld: TypeAlias = Annotated[
    bool, typer.Option("--remove-old", help="Remove surplus shards of an earlier, larger run.")
]
Rekey: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="PATTERN",
        help="A pattern for new keys with {number}, {key}, {name} and {shard}, such as '{number:08d}'.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """The options of all commands that write shards."""

    maxcount: Annotated[
        int, typer.Option("--maxcount", min=1, metavar="NUMBER", help="The maximum number of samples in a shard.")
    ] = 100_000
    maxsize: Annotated[
        str, typer.Option("--maxsize", metavar="BYTES", help="The maximum size of a shard, such as 500MB or 2GiB.")
    ] = "3GB"
    compress: Compression = None
    index: Annotated[
        bool, typer.Option("--index", help="Write an index next to each shard, like the command index.")
    ] = False
    remove_old: RemoveOld = False
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip bad samples, and the rest of bad shards, and report them.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class CopyOptions(WriterOptions, LimitedOptions):
    """The options of all commands that copy samples unchanged."""


class Output:
    """One archive, or numbered shards if the name contains ``%06d`` or the like.

    Args:
        target: a path or URL, ``pipe:COMMAND`` or ``-``.
        urls: the source shards, which numbered shards must not replace: some would be lost before they are read, or if
            a later one cannot be written.
        options: the options of the command.
    """

    def __init__(self, target: str, urls: list[str], options: CopyOptions) -> None:
        if target == "-" and options.as_json:
            raise WrongUse("--json and the archive cannot both go to standard output. Name a file with --output")
        if target == "-" and sys.stdout.isatty():
            raise WrongUse("An archive cannot be written to a terminal. Name a file with --output, or write to a pipe")
        self._writer: ShardWriter | TarWriter
        maxsize = parse_bytes(options.maxsize, "--maxsize")
        given: dict[str, Any] = {
            "encoder": False,
            "compress": options.compress,
            "index": options.index,
            "key_rule": options.rule,
            "storage_options": options.store,
        }
        try:
            if NUMBER.search(target):
                if (read := find_overwritten(target, urls)) is not None:
                    raise WrongUse(
                        f"{redact(target)!r} may overwrite {redact(read)!r}, which is an input. Choose another name or "
                        f"folder for --output"
                    )
                given |= {"verbose": False, "old_shards": "remove" if options.remove_old else "keep"}
                self._writer = ShardWriter(target, maxcount=options.maxcount, maxsize=maxsize, **given)
            else:
                self._writer = TarWriter(target, **given)
        except (ValueError, TypeError) as error:
            raise WrongUse(str(error)) from None

    @property
    def shards(self) -> list[ShardInfo]:
        """The complete shards written."""
        if isinstance(self._writer, ShardWriter):
            return self._writer.shards
        return [] if self._writer.info is None else [self._writer.info]

    @property
    def old_shards(self) -> list[str]:
        """The remaining shards of an earlier run, which would be read together with the new ones."""
        return self._writer.old_shards if isinstance(self._writer, ShardWriter) else []

    def write(self, sample: Sample) -> None:
        """Write a sample.

        Raises:
            EncodeError: it would be read back as a different sample; nothing was written.
        """
        try:
            self._writer.write(sample)
        except EncodeError as error:
            raise with_option_hint(error) from None

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._writer.__exit__(kind, error, traceback)


def with_option_hint(error: EncodeError) -> EncodeError:
    """Return an error that names the option that avoids it, if the command has one."""
    advice = "On the command line, --rekey '{number:08d}' creates new keys"
    return EncodeError(f"{error}. {advice}") if has_options(advice) else error


def copy_samples(
    urls: list[str],
    outputs: Collection[Output],
    choose: Callable[[Sample], Output],
    options: CopyOptions,
    *,
    label: str,
    shown: bool = True,
    **taken: Any,
) -> list[Exception]:
    """Copy samples of shards, and return the skipped errors.

    Args:
        urls: the shards to read.
        outputs: the possible outputs. They are finished at the end, or discarded on an error or Ctrl-C.
        choose: returns the output for a sample.
        options: the options of the command.
        label: the label of the progress bar.
        shown: whether a progress bar may be shown.
        **taken: the part of the shards to copy, as for `Subset`.
    """
    faults: list[Exception] = []

    def skip(error: Exception) -> bool:
        faults.append(error)
        return True

    subset = make_subset(on_error=skip if options.skip_bad else "raise", **options.reading, **taken)
    with ExitStack() as opened, ProgressMeter(label, len(urls), shown=shown) as meter:
        for output in outputs:
            opened.enter_context(output)
        latest = ""

        def seen(sample: Sample) -> None:
            nonlocal latest
            is_next = bool(latest) and sample["__url__"] != latest
            latest = sample["__url__"]
            meter.add(shards=is_next, samples=1, size=sum(len(v) for v in sample.values() if type(v) is bytes))

        for sample in subset.samples(urls, on_read=seen):
            with ExitStack() if not options.skip_bad else _noting(faults):
                choose(sample).write(sample)
    return faults


def make_subset(**options: Any) -> Subset:
    """Make a subset; raise `WrongUse` for invalid options."""
    try:
        return Subset(**options)
    except ValueError as error:
        raise WrongUse(str(error)) from None


@contextmanager
def _noting(faults: list[Exception]) -> Iterator[None]:
    """Skip a sample that is rejected."""
    try:
        yield
    except EncodeError as error:
        faults.append(error)


def report(shards: list[ShardInfo], faults: list[Exception], *, as_json: bool, **facts: object) -> None:
    """Print the shards written, and the skipped errors to standard error."""
    if as_json:
        written = [{"url": redact(info.url), "samples": info.samples, "bytes": info.bytes} for info in shards]
        skipped = [{"kind": type(error).__name__, "message": str(error)} for error in faults]
        sys.stdout.write(json.dumps({**facts, "shards": written, "skipped": skipped}) + "\n")
        return
    for info in shards:
        sys.stdout.write(
            f"{printable(redact(info.url))}: {plural(info.samples, 'sample')}, {human_bytes(info.bytes)}\n"
        )
    sys.stdout.flush()
    print_skipped([(type(error).__name__, str(error)) for error in faults])


def print_skipped(errors: Sequence[tuple[str, str]]) -> None:
    """Print the kinds and messages of the first skipped errors to standard error."""
    for kind, message in errors[:SHOWN]:
        typer.echo(f"Skipped: {kind}: {on_one_line(message)}", err=True)
    if len(errors) > SHOWN:
        typer.echo(f"Skipped: {len(errors) - SHOWN:,} more", err=True)


def check_outputs(outputs: Collection[Output], urls: list[str]) -> None:
    """Report if nothing was written, and fail if shards of an earlier run remain among the new ones."""
    if not any(info.samples for output in outputs for info in output.shards):
        say_nothing_found(len(urls), "sample to write")
    found = [output.old_shards for output in outputs if output.old_shards]
    for urls in found:
        typer.echo(f"Error: {on_one_line(describe_old_shards(urls))}. Remove them, or use --remove-old", err=True)
    if found:
        raise typer.Exit(FAULT_FOUND)


def parse_slice_text(text: str) -> tuple[int | None, ...]:
    """Return the start, stop and step of a slice.

    >>> parse_slice_text("10:20"), parse_slice_text(":100:2"), parse_slice_text("5:")
    ((10, 20), (None, 100, 2), (5, None))
    """
    if not text:
        return ()
    words = text.split(":")
    try:
        if not 2 <= len(words) <= 3:
            raise ValueError
        positions = tuple(int(word) if word else None for word in words)
        if any(position is not None and position < 0 for position in positions) or positions[2:] == (0,):
            raise ValueError
    except ValueError:
        raise WrongUse(
            f"--slice must be START:STOP or START:STOP:STEP, counted from 0, as in 10:20, not {text!r}"
        ) from None
    return positions
