"""Copying samples as they are to archives, shards and commands: what ``cat`` and ``split`` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, has_options, on_one_line, printable, say_nothing_found
from wds_datapipes.cli._meter import ProgressMeter, human_bytes, plural
from wds_datapipes.errors import UnwritableSampleError
from wds_datapipes.io.openers import redact
from wds_datapipes.prepare.subset import Subset
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, written_over
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Compression",
    "MaxCount",
    "MaxSize",
    "Output",
    "RemoveOld",
    "SkipBad",
    "WithIndex",
    "check_outputs",
    "copy_samples",
    "parse_slice_text",
    "report",
    "with_option_hint",
]

#: How many of the errors that were passed over are shown.
SHOWN = 10

MaxCount: TypeAlias = Annotated[int, typer.Option("--maxcount", min=1, help="The most samples of a shard.")]
MaxSize: TypeAlias = Annotated[
    str, typer.Option("--maxsize", metavar="BYTES", help="The most bytes of a shard, such as 500MB or 2GiB.")
]
Compression: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--compress", metavar="KIND", help="gz, bz2, xz or zst, if the name does not tell it.", show_default=False
    ),
]
WithIndex: TypeAlias = Annotated[
    bool, typer.Option("--index", help="Write the index of each shard beside it, as the command index does.")
]
RemoveOld: TypeAlias = Annotated[
    bool, typer.Option("--remove-old", help="Remove the shards that an earlier run with more of them has left.")
]
SkipBad: TypeAlias = Annotated[
    bool, typer.Option("--skip-bad", help="Pass over bad samples, and the rest of bad shards, and say which.")
]


class Output:
    """One archive, or shards with numbers where the name has ``%06d`` or the like.

    Args:
        target: path or URL, ``pipe:COMMAND`` or ``-``.
        maxcount: how many samples a shard with a number has at the most.
        maxsize: how many bytes.
        remove_old: remove the shards of an earlier run that had more of them.
        urls: the shards that are read, which a shard with a number may not replace: some would be lost before they are
            read, or when a later one cannot be written.
        **options: for the writer.
    """

    def __init__(
        self, target: str, *, maxcount: int, maxsize: float, remove_old: bool, urls: list[str], **options: Any
    ) -> None:
        if target == "-" and sys.stdout.isatty():
            raise WrongUse("An archive is nothing for a terminal. Name a file with --output, or send it to a pipe")
        self._writer: ShardWriter | TarWriter
        try:
            if NUMBER.search(target):
                if (read := written_over(target, urls)) is not None:
                    raise WrongUse(
                        f"{redact(read)!r} is read, and {redact(target)!r} may be written over it. Give --output "
                        f"another name, or another folder"
                    )
                options |= {"verbose": False, "digest": False, "old_shards": "remove" if remove_old else "keep"}
                self._writer = ShardWriter(target, maxcount=maxcount, maxsize=maxsize, encoder=False, **options)
            else:
                self._writer = TarWriter(target, encoder=False, **options)
        except (ValueError, TypeError) as error:
            raise WrongUse(str(error)) from None

    @property
    def shards(self) -> list[ShardInfo]:
        """What was written and is whole."""
        if isinstance(self._writer, ShardWriter):
            return self._writer.shards
        return [] if self._writer.info is None else [self._writer.info]

    @property
    def old_shards(self) -> list[str]:
        """The shards of an earlier run that are still there, and would be read with those that were written."""
        return self._writer.old_shards if isinstance(self._writer, ShardWriter) else []

    def write(self, sample: Sample) -> None:
        """Write a sample.

        Raises:
            UnwritableSampleError: it would be read back as another; it has left nothing.
        """
        try:
            self._writer.write(sample)
        except UnwritableSampleError as error:
            raise with_option_hint(error) from None

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._writer.__exit__(kind, error, traceback)


def with_option_hint(error: UnwritableSampleError) -> UnwritableSampleError:
    """Return an error that says which option cures it, if the command has it."""
    advice = "On the command line, --rekey '{number:08d}' makes new keys"
    return UnwritableSampleError(f"{error}. {advice}") if has_options(advice) else error


def copy_samples(
    make: Callable[[Callable[[Exception], bool] | str], Subset],
    urls: list[str],
    outputs: Iterable[Output],
    choose: Callable[[Sample], Output],
    *,
    skip_bad: bool,
    label: str,
    shown: bool,
) -> list[Exception]:
    """Copy the samples of an excerpt, and return the errors that were passed over.

    Args:
        make: makes the excerpt with an error policy.
        urls: the shards to read.
        outputs: what may be written to. They are finished at the end, or discarded when an error or Ctrl-C comes.
        choose: tells which of them a sample is for.
        skip_bad: pass over errors.
        label: what the bar says.
        shown: whether there may be a bar.
    """
    faults: list[Exception] = []

    def passes(error: Exception) -> bool:
        faults.append(error)
        return True

    excerpt = make(passes if skip_bad else "raise")
    with ExitStack() as opened, ProgressMeter(label, len(urls), shown=shown) as meter:
        for output in outputs:
            opened.enter_context(output)
        latest = ""

        def seen(sample: Sample) -> None:
            nonlocal latest
            is_next = bool(latest) and sample["__url__"] != latest
            latest = sample["__url__"]
            meter.add(shards=is_next, samples=1, size=sum(len(v) for v in sample.values() if type(v) is bytes))

        for sample in excerpt.samples(urls, on_read=seen):
            with ExitStack() if not skip_bad else _noting(faults):
                choose(sample).write(sample)
    return faults


@contextmanager
def _noting(faults: list[Exception]) -> Iterator[None]:
    """Pass over a sample that is refused."""
    try:
        yield
    except UnwritableSampleError as error:
        faults.append(error)


def report(shards: list[ShardInfo], faults: list[Exception], *, as_json: bool, **facts: object) -> None:
    """Print what was written, and to standard error what was passed over."""
    if as_json:
        told = [{"url": redact(info.url), "samples": info.samples, "bytes": info.bytes} for info in shards]
        skipped = [{"kind": type(error).__name__, "message": str(error)} for error in faults]
        sys.stdout.write(json.dumps({**facts, "shards": told, "skipped": skipped}) + "\n")
        return
    for info in shards:
        sys.stdout.write(
            f"{printable(redact(info.url))}: {plural(info.samples, 'sample')}, {human_bytes(info.bytes)}\n"
        )
    sys.stdout.flush()
    for error in faults[:SHOWN]:
        typer.echo(f"Passed over: {type(error).__name__}: {on_one_line(str(error))}", err=True)
    if len(faults) > SHOWN:
        typer.echo(f"Passed over: {len(faults) - SHOWN:,} more", err=True)


def check_outputs(outputs: Collection[Output], urls: list[str]) -> None:
    """Say so if nothing was written, and end with a fault if shards of an earlier run are among the new ones."""
    if not any(info.samples for output in outputs for info in output.shards):
        say_nothing_found(len(urls), "sample to write")
    found = [output.old_shards for output in outputs if output.old_shards]
    for urls in found:
        typer.echo(f"Error: {on_one_line(describe_old_shards(urls))}. Remove them, or use --remove-old", err=True)
    if found:
        raise typer.Exit(FAULT_FOUND)


def parse_slice_text(text: str) -> tuple[int | None, ...]:
    """Return the positions of a slice.

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
        raise WrongUse(f"--slice is START:STOP or START:STOP:STEP, counted from 0, as in 10:20, not {text!r}") from None
    return positions
