"""Load shards: open each in turn, decompress it, read its members, and close it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, ClassVar

from wds_datapipes.arguments import check_choice, check_integer, check_optional_integer
from wds_datapipes.errors import ChangedShardError, CorruptShardError, ShardError, ShardOpenError, TruncatedShardError
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.prefetch import ShardPrefetcher
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.streams import name_read_errors
from wds_datapipes.io.timeouts import Timeouts
from wds_datapipes.io.urls import OpeningURL, check_url
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy, OnError, check_on_error
from wds_datapipes.redaction import short_repr
from wds_datapipes.shards.position import ALL_SHARDS, WHOLE, Resume
from wds_datapipes.shards.seeking import ArchiveSpans, check_unchanged, open_archive
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import MemberTuple, Shard


@dataclass(frozen=True)
class StreamOptions:
    """Options for opening and reading shards of any format; `ShardLoader` describes each option.

    A subclass represents a format: it has the options of the format, and turns the stream of a shard into items.

    Attributes:
        stage: the stage that reads the format, for errors.
        counts_shards: whether an error budget counts shards; otherwise, `items` counts the items that it reads.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an invalid value.
    """

    stage: ClassVar[str]
    counts_shards: ClassVar[bool] = True

    on_error: OnError | CountedErrors = "raise"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    timeout_s: float | Timeouts | None = None
    retries: int | None = None
    #: In bytes; 0 disables prefetching.
    read_ahead: int = 0
    limits: ReadLimits = DEFAULT_LIMITS
    allow_local_files: bool = True
    #: The number of shards that are read at the same time.
    open_shards: int = 1

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        Timeouts.of(self.timeout_s)
        check_optional_integer("retries", self.retries, 0)
        check_integer("read_ahead", self.read_ahead, 0)
        check_integer("open_shards", self.open_shards, 1)
        if not isinstance(self.limits, ReadLimits):
            raise TypeError(f"limits must be a ReadLimits, such as ReadLimits(member_bytes=10**9), not {self.limits!r}")

    @property
    def opener_options(self) -> dict[str, Any]:
        """The options to pass to `open_url`."""
        names = ("storage_options", "timeout_s", "retries", "allow_local_files")
        return {name: getattr(self, name) for name in names}

    def items(self, stream: BinaryIO, shard: Shard, start: int, policy: ErrorPolicy) -> Iterator[MemberTuple]:
        """Yield the items of an uncompressed shard, as tuples of the shard, a name, a value and an offset.

        Args:
            stream: the shard, or the part of it to read.
            shard: the first value of each item; ``shard.end`` is the offset at which the part ends, or -1.
            start: the offset at which the part starts.
            policy: handles errors that concern a single item; all other errors are raised.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TarOptions(StreamOptions):
    """Options for reading tar shards; `ShardLoader` describes each option.

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


DEFAULT_OPTIONS = TarOptions()

ShardMembers = tuple[Shard, Iterator[MemberTuple]]
"""A shard and its members, which must be read before the next shard is requested."""


def read_shards(
    source: Iterable[str | os.PathLike[str]], options: StreamOptions = DEFAULT_OPTIONS
) -> Iterator[ShardMembers]:
    """Read the shards of ``source`` in turn; yield each with its members."""
    return iter(ShardReader(source, options))


def load_wds_shards(
    source: Iterable[str | os.PathLike[str]], options: TarOptions = DEFAULT_OPTIONS
) -> Iterator[MemberTuple]:
    """Yield the members of shards as plain tuples."""
    for _, members in read_shards(source, options):
        yield from members


class ShardReader:
    """A pass over shards, from the beginning or from a state.

    Iteration yields each shard with its members. To keep several shards open, the caller gets them from `shards` and
    decides which one to `read` next.

    The error policy applies per shard: if reading fails, the rest of the shard is skipped. The members yielded before
    the error remain valid, and the shard is marked as incomplete.

    Remote shards are prefetched, up to ``read_ahead`` bytes; see `ShardPrefetcher`.

    Args:
        source: yields the paths or URLs of shards.
        options: how to read them.
        resume: the part that is still to be read.
    """

    def __init__(
        self, source: Iterable[str | os.PathLike[str]], options: StreamOptions, resume: Resume = ALL_SHARDS
    ) -> None:
        self.options, self._resume = options, resume
        self._source, self._taken = source, 0
        self._policy = ErrorPolicy(options.on_error, options.stage)
        self._opener_options = {**options.opener_options, "counters": self._policy.counters}
        remaining = source if resume.last == sys.maxsize else islice(source, resume.last + 1)  # may be infinite
        self._prefetcher = ShardPrefetcher(
            remaining, options.read_ahead, self._opener_options, resume.is_whole, options.open_shards
        )

    @property
    def has_ended(self) -> bool:
        """Whether the error policy has ended reading."""
        return self._policy.has_ended

    def __iter__(self) -> Iterator[ShardMembers]:
        try:
            for shard in self.shards():
                yield from self.read(shard, self._resume.spans(shard.number))
            self.finish()
        finally:
            self.close()

    def shards(self) -> Generator[Shard, None, None]:
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

    def read(self, shard: Shard, spans: Sequence[tuple[int, int]]) -> Iterator[ShardMembers]:
        """Read spans of a shard in order, each as a separate shard with the same number.

        Raises:
            ChangedShardError: the shard has changed since the state was saved.
        """
        if not spans:
            return
        self._policy.counters.record_shard(redact(shard.url))
        if spans == [WHOLE]:
            yield shard, self._read_whole(shard)
            return
        open_rest = partial(self._prefetcher.open_rest, shard.number, shard.url)
        archive = ArchiveSpans(shard.url, self._opener_options, self.options.limits, spans[-1][0], open_rest)
        with closing(archive):
            for start, end in spans:
                part = Shard(shard.url, shard.local_path, shard.number, end)
                yield part, self._read_span(part, archive, start, is_last=(start, end) == spans[-1])
                if not part.is_complete:
                    break

    def finish(self) -> None:
        """Warn about skipped shards that were not reported yet; count those left unread."""
        if self._policy.has_ended:
            self._policy.count_unread(self._source, self._taken)
        self._policy.finish()

    def stop(self) -> None:
        """Stop prefetching, without waiting for the threads; shards that are open cannot be read on."""
        self._prefetcher.stop()

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetcher.close()

    def _read_whole(self, shard: Shard) -> Iterator[MemberTuple]:
        with self._handle_errors(shard), ExitStack() as stack:
            opener = partial(self._prefetcher.open, shard.number)
            stream = open_archive(shard.url, self._opener_options, stack, opener, limits=self.options.limits)
            yield from self.options.items(stream, shard, 0, self._policy)
            with name_read_errors(redact(shard.url)):
                stack.close()

    def _read_span(self, part: Shard, archive: ArchiveSpans, start: int, *, is_last: bool) -> Iterator[MemberTuple]:
        with self._handle_errors(part):
            try:
                members = self.options.items(archive.open_span(start, part.end), part, start, self._policy)
                yield from check_unchanged(members, part, start, self._resume)
            except BaseException:
                archive.close()
                raise
            if is_last:
                archive.close()  # may raise an error, such as that of a failed command

    @contextmanager
    def _handle_errors(self, shard: Shard) -> Iterator[None]:
        """Record whether a shard was read to its end, and apply the error policy if reading fails."""
        try:
            yield
            shard.is_complete = True
        except ChangedShardError:
            raise  # regardless of the error policy, because the loaded state does not fit
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
    except ShardOpenError:  # opening the shard raises it again, under the error policy
        return None
