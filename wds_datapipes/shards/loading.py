"""Shard loading: opens each shard in turn, decompresses it, reads its members and closes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, ClassVar

from wds_datapipes.arguments import check_choice, check_integer, check_optional_integer
from wds_datapipes.errors import (
    ChangedShardError,
    CorruptShardError,
    ShardError,
    ShardOpenError,
    ShardReadError,
    TruncatedShardError,
)
from wds_datapipes.io.compression.decompress import decompress_stream
from wds_datapipes.io.openers import local_path, open_url, redact
from wds_datapipes.io.prefetch import ShardPrefetcher
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.urls import OpeningURL, check_url
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy, OnError, check_on_error
from wds_datapipes.redaction import short_repr
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import MemberTuple, Opener, Shard


@dataclass(frozen=True)
class StreamOptions:
    """How shards of any format are opened and read; `ShardLoader` describes each option.

    A subclass is a format: it has the options of the format, and turns the stream of a shard into its items.

    Attributes:
        stage: the stage that reads the format, for errors.
        counts_shards: whether an error budget counts shards; otherwise `items` counts what it reads.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an invalid value.
    """

    stage: ClassVar[str]
    counts_shards: ClassVar[bool] = True

    on_error: OnError | CountedErrors = "raise"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    timeout_s: float | None = None
    retries: int | None = None
    #: In bytes; 0 disables prefetching.
    read_ahead: int = 0
    limits: ReadLimits = DEFAULT_LIMITS
    allow_local_files: bool = True
    #: The number of shards that are read at the same time.
    open_shards: int = 1

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be a positive number of seconds, not {self.timeout_s!r}")
        check_optional_integer("retries", self.retries, 0)
        check_integer("read_ahead", self.read_ahead, 0)
        check_integer("open_shards", self.open_shards, 1)
        if not isinstance(self.limits, ReadLimits):
            raise TypeError(f"limits must be a ReadLimits, such as ReadLimits(member_bytes=10**9), not {self.limits!r}")

    @property
    def opener_options(self) -> dict[str, Any]:
        """The options to pass to `open_url`."""
        options = {
            "storage_options": self.storage_options,
            "timeout_s": self.timeout_s,
            "retries": self.retries,
            "allow_local_files": None if self.allow_local_files else False,
        }
        return {name: value for name, value in options.items() if value is not None}

    def items(self, stream: BinaryIO, shard: Shard, start: int, policy: ErrorPolicy) -> Iterator[MemberTuple]:
        """Yield the items of an uncompressed shard: the shard, their names, their values and their offsets.

        Args:
            stream: the shard, or the part of it that is to be read.
            shard: the first value of each item; ``shard.end`` is the offset at which the part ends, or -1.
            start: the offset at which the part starts.
            policy: handles errors that concern one item; all others are raised.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ReadOptions(StreamOptions):
    """How tar shards are read; `ShardLoader` describes each option.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an invalid value.
    """

    stage: ClassVar[str] = "load_wds_shards"

    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    ignore_zeros: bool = False
    end_marker: EndMarker = "required"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("end_marker", self.end_marker, EndMarker)
        for option in ("select_files", "rename_files"):
            function = getattr(self, option)
            if function is not None and not callable(function):
                raise TypeError(f"{option} must be a function of a file name, not {function!r}")

    def items(self, stream: BinaryIO, shard: Shard, start: int, policy: ErrorPolicy) -> Iterator[MemberTuple]:  # noqa: ARG002  an error always concerns the rest of a tar archive
        """Yield the members of a tar archive."""
        return read_members(
            stream,
            shard=shard,
            archive=redact(shard.url),
            select_files=self.select_files,
            rename_files=self.rename_files,
            ignore_zeros=self.ignore_zeros,
            end_marker=self.end_marker,
            start=start,
            stop=shard.end,
            limits=self.limits,
        )


DEFAULT_OPTIONS = ReadOptions()

ShardMembers = tuple[Shard, Iterator[MemberTuple]]
"""A shard and its members, which must be read before the next shard is requested."""


def read_shards(
    source: Iterable[str | os.PathLike[str]], options: StreamOptions = DEFAULT_OPTIONS
) -> Iterator[ShardMembers]:
    """Read the shards of ``source`` in turn, and yield each with its members.

    The error policy applies per shard: if reading fails, the rest of the shard is skipped. The members yielded before
    the error remain valid, and the shard is marked as incomplete.

    Remote shards are prefetched, up to ``read_ahead`` bytes: see `ShardPrefetcher`.
    """
    reader = ShardReader(source, options)
    for shard in reader:
        yield shard, reader.read(shard)
    reader.finish()


def load_wds_shards(
    source: Iterable[str | os.PathLike[str]], options: ReadOptions = DEFAULT_OPTIONS
) -> Iterator[MemberTuple]:
    """Yield the members of shards as plain tuples."""
    for _, members in read_shards(source, options):
        yield from members


class ShardReader:
    """One pass over shards: yields each, and reads its members. At most ``options.open_shards`` may be open.

    Args:
        source: yields the paths or URLs of shards.
        options: how to read them.
        is_whole: returns whether the shard with this number is read completely, and so may be prefetched.
    """

    def __init__(
        self,
        source: Iterable[str | os.PathLike[str]],
        options: StreamOptions,
        is_whole: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.options = options
        self._source, self._taken = source, 0
        self._policy = ErrorPolicy(options.on_error, options.stage)
        self.opener_options = {**options.opener_options, "counters": self._policy.counters}
        self._prefetcher = ShardPrefetcher(
            source, options.read_ahead, self.opener_options, is_whole, options.open_shards
        )

    @property
    def has_ended(self) -> bool:
        """Whether the error policy has ended reading."""
        return self._policy.has_ended

    def __iter__(self) -> Iterator[Shard]:
        """Yield the shards in order, until the source is exhausted or the error policy ends reading."""
        counts_shards = self.options.counts_shards
        for number, url in enumerate(self._policy.counted(self._prefetcher) if counts_shards else self._prefetcher):
            if not isinstance(url, str | os.PathLike):
                raise TypeError(
                    f"{self.options.stage} reads shards by their URL, so its source must yield str, not "
                    f"{type(url).__name__}: {short_repr(url)}"
                )
            path = os.fspath(url)
            check_url(path, allow_local_files=self.options.allow_local_files)  # regardless of the error policy
            self._taken = number + 1
            yield Shard(path, _local_path(path), number)
            if self._policy.has_ended:
                return

    def finish(self) -> None:
        """Warn about the skipped shards, if there are more than already reported; count those left unread."""
        if self._policy.has_ended:
            self._policy.count_unread(self._source, self._taken)
        self._policy.finish()

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetcher.close()

    def read(self, shard: Shard) -> Iterator[MemberTuple]:
        """Yield all members of a shard."""
        self.record_shard(shard)
        with self.handle_errors(shard), ExitStack() as stack:
            opener = partial(self._prefetcher.open, shard.number)
            stream = open_archive(shard.url, self.opener_options, stack, opener, limits=self.options.limits)
            yield from self.members(stream, shard)

    def record_shard(self, shard: Shard) -> None:
        """Record a shard as the one being read."""
        self._policy.counters.record_shard(redact(shard.url))

    def members(self, stream: BinaryIO, shard: Shard, start: int = 0) -> Iterator[MemberTuple]:
        """Yield the items of an uncompressed shard, or of the part of it that begins at byte ``start``."""
        return self.options.items(stream, shard, start, self._policy)

    @contextmanager
    def handle_errors(self, shard: Shard) -> Iterator[None]:
        """Record whether a shard was read to its end, and apply the error policy if reading fails."""
        try:
            yield
            shard.is_complete = True
        except ChangedShardError:
            raise  # regardless of the error policy: the loaded state does not fit
        except ShardError as error:
            shard.is_complete = False
            if isinstance(shard.url, OpeningURL) and isinstance(error, CorruptShardError | TruncatedShardError):
                shard.url.disown(error)
            self._policy.handle(error, url=shard.url, ends_stage=not shard.has_begun)
        finally:
            shard.is_complete = shard.is_complete is True


def _local_path(url: str) -> str | None:
    try:
        return local_path(url)
    except ShardOpenError:  # opening the shard raises it again, where the error policy applies
        return None


def open_archive(
    url: str, options: Mapping[str, Any], stack: ExitStack, opener: Opener | None = None, *, limits: ReadLimits
) -> BinaryIO:
    """Open a shard and decompress it; ``stack`` closes it."""
    try:
        raw = stack.enter_context((opener or open_url)(url, **options))
        return stack.enter_context(decompress_stream(raw, url=url, limits=limits))
    except ShardError:
        raise
    except OSError as error:
        raise read_error(redact(url), error) from error


def read_error(archive: str, error: OSError) -> ShardReadError:
    """Return the error for a shard that the operating system or a library fails to read."""
    return ShardReadError(f"{archive} could not be read to its end: {type(error).__name__}: {error}")
