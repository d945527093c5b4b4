"""The stage ``.load_wds_shards()``: read the members of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.io.prefetch import READ_AHEAD_BYTES
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.timeouts import Timeouts
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.shards.shard_reading import ShardReadingStage
from wds_datapipes.shards.loading import TarOptions
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Member


class ShardLoader(ShardReadingStage[Member]):
    """Read the files of each shard (functional name: ``load_wds_shards``).

    A shard is a local path, a ``file:`` URL, ``-`` for standard input, ``pipe:`` and a shell command that writes a tar
    archive, a URL with a scheme of `register_opener`, or any URL that fsspec opens. gzip, bzip2, xz and zstd (extra
    ``zst``) are detected by content. Shards are streamed, and are closed at their end, after an error, and when
    iteration is abandoned.

    Yields:
        Member: ``(shard, name: str, data: bytes, offset: int)`` of each regular file, in the order of the archive, with
        the URL of its shard as ``url``; ``offset`` is the byte at which its first header starts in the uncompressed
        archive.

    Args:
        source: yields the URL of each shard.
        select_files: a function of a file's name, called before the data is read; return False to skip the file.
        rename_files: a function from a file's name to its new name; ``select_files`` receives the new name.
        ignore_zeros: continue after an end marker to read concatenated archives.
        end_marker: ``"optional"`` accepts archives without the two blocks of zeros that usually end a tar archive. Such
            an archive cannot be distinguished from one that was truncated between two files. ``"final"`` requires the
            blocks and ignores data that follow them.
        on_error: ``"raise"``, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler; all but the first skip the rest of
            an unreadable shard. The incomplete sample at the error is never yielded.
        storage_options: options for fsspec to open the shards, such as credentials.
        timeout_s: how long a store may take to respond or to send a byte before it has failed, in seconds; 30 by
            default for web servers. `Timeouts` has this limit and the others, such as that for connecting.
        retries: the number of retries per shard after transient failures, such as a broken connection or a busy server;
            per part of a shard that is fetched in parts, since an outage breaks all of them at once. Reading resumes at
            the next byte if the store can verify that the file has not changed. 10 by default, with growing pauses of
            at most five minutes in total.
        read_ahead: the number of bytes of remote shards, including the next ones, that threads prefetch, so that the
            end of a shard causes no wait; 64 MiB by default, at least 128 KiB, 0 to disable. Shards of a distant store
            come in parts of a thirty-second of this size, at least 1 and at most 8 MiB, over as many connections as the
            reader needs. URLs are taken from the source in advance while all of them are remote. The open shards and
            the next one share this budget equally, with at least 64 KiB each. Shards of a store that is as fast as a
            local disk are read without threads.
        open_shards: the number of shards that are open at the same time. ``.group_samples()``, which must come directly
            after this stage, takes one sample from each in turn, so that a shuffle buffer mixes more shards. When a
            shard ends, the next one takes its place.
        limits: limits, such as on the size of members; see `ReadLimits`. The defaults reject only malicious or damaged
            shards.
        allow_local_files: False opens only files on a network; pass it to `ShardList` as well.

    Raises:
        RuntimeError: ``open_shards`` is greater than 1, but the next stage is not ``.group_samples()``, or the shards
            come from `DirectoryShards`.
        ShardOpenError: a shard does not exist, or access is denied.
        TruncatedShardError: a shard is truncated, or ends without its end marker.
        CorruptShardError: a header's checksum is wrong, or the file is not a tar archive.
        UnsupportedMemberError: a shard contains a sparse file.
        ReadLimitError: a shard exceeds its limits; a member that is too large is not read.
        UnsafeInputError: a shard is a local file or a command, and ``allow_local_files`` is False; no ``on_error``
            skips this.
        ChangedShardError: a shard was replaced while it was read; no ``on_error`` skips this.
        ShardReadError: a ``pipe:`` command failed, even if the archive is complete; or the disk, the store or the
            network failed.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": "a", "txt": b"one", "cls": b"1"}])
        >>> [(member.name, member.data, member.offset) for member in ShardList(shard).load_wds_shards()]
        [('a.txt', b'one', 0), ('a.cls', b'1', 1024)]
    """

    def __init__(
        self,
        source: IterDataPipe[str],
        *,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        ignore_zeros: bool = False,
        end_marker: EndMarker = "required",
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float | Timeouts | None = None,
        retries: int | None = None,
        read_ahead: int = READ_AHEAD_BYTES,
        open_shards: int = 1,
        limits: ReadLimits = DEFAULT_LIMITS,
        allow_local_files: bool = True,
    ) -> None:
        options = TarOptions(
            select_files=select_files,
            rename_files=rename_files,
            ignore_zeros=ignore_zeros,
            end_marker=end_marker,
            on_error=on_error,
            storage_options=storage_options,
            timeout_s=timeout_s,
            retries=retries,
            read_ahead=read_ahead,
            open_shards=open_shards,
            limits=limits,
            allow_local_files=allow_local_files,
        )
        self._store(source, options)

    def member_reader(self) -> ShardLoader | None:
        """Return this stage, unless a subclass has another loop."""
        return self if type(self).__iter__ is ShardLoader.__iter__ else None

    def __iter__(self) -> Iterator[Member]:
        if self.open_shards > 1:
            raise RuntimeError(
                f"load_wds_shards(open_shards={self.open_shards}) takes one sample of each shard in turn, and only "
                "group_samples knows which files form a sample. Put .group_samples() directly after it; select_files "
                "and rename_files replace .filter() and .map() between the two"
            )
        for _, members in self.open_reader():
            yield from map(Member._make, members)
