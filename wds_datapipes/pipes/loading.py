"""From shards to their members."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.io.prefetch import READ_AHEAD_BYTES
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.sharding import unsplit, warn_if_hidden
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.shards.loading import ReadOptions, ShardMembers, read_shards
from wds_datapipes.shards.position import Resume
from wds_datapipes.shards.seeking import resume_shards
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Member

__all__ = ["ShardLoader"]


@register_stage("load_wds_shards")
class ShardLoader(Stage[Member]):
    """Read the files of each shard (functional name: ``load_wds_shards``).

    A shard is a local path, a ``file:`` URL, ``-`` for standard input, ``pipe:`` and a shell command that writes a tar
    archive, a scheme of `register_opener`, or any URL that fsspec opens. gzip, bzip2, xz and zstd (extra ``zst``)
    are recognised by content. Shards are read as streams, forward and once, and closed when they end, when they fail
    and when iteration is abandoned.

    Yields:
        Member: ``(shard, name: str, data: bytes, offset: int)`` of each regular file, in the order of the archive, and
        the URL of its shard as ``url``; ``offset`` is where its first header begins in the uncompressed archive.

    Args:
        source: yields the URL of each shard.
        select_files: gets a file's name before its data is read; files that it refuses are passed over without being
            kept.
        rename_files: gets a file's name and returns the one to use; ``select_files`` sees the new name.
        ignore_zeros: go on behind an end marker, to read archives that were concatenated.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros that end a tar archive. Such an
            archive cannot be told from one that was cut between two files.
        on_error: ``"raise"``, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler; all but the first pass over the
            rest of a shard that cannot be read. The sample that was being read when it failed is never handed on.
        storage_options: what fsspec needs to open the shards, such as credentials.
        timeout_s: after how many seconds without an answer or a byte a store has failed; 30 by default for web servers.
        retries: how often a shard of a store is asked for again, in all, after failures that may pass: a connection
            that breaks, a server that is busy. It is read on from the byte that is next, if the store can tell that it
            is still the same file; 10 by default, with growing pauses between them, of five minutes at the most.
        read_ahead: how many bytes of remote shards are read by threads before they are asked for, those of the next
            shards included, so that nothing waits for a store where a shard ends; 32 MiB by default, 128 KiB at
            least, and 0 is none. The source is asked for the next shards meanwhile, while all of them are remote.
        limits: what a shard may ask for: how large its members are, and more, see `ReadLimits`. The defaults refuse
            what only an attack or damage asks for.
        safe: open nothing but files on a network; see `ShardList`, which should have it as well.

    Raises:
        ShardOpenError: a shard is not there, or may not be read.
        TruncatedShardError: a shard is cut anywhere, or ends without its end marker.
        CorruptShardError: a header's checksum is wrong, or the file is no tar archive.
        UnsupportedMemberError: a shard holds a sparse file.
        ReadLimitError: a shard asks for more than its limits; a member that is too large is not read.
        RefusedURLError: with ``safe``, a shard is a local file or a command; no ``on_error`` passes over that.
        ChangedShardError: a shard was replaced while it was read; no ``on_error`` passes over that.
        CommandError: a ``pipe:`` command ended with an error, even if the archive looked whole.
        ShardReadError: the disk, the store or the network failed.

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
        timeout_s: float | None = None,
        retries: int | None = None,
        read_ahead: int = READ_AHEAD_BYTES,
        limits: ReadLimits = DEFAULT_LIMITS,
        safe: bool = False,
    ) -> None:
        super().__init__()
        # Under one private name: torch prints the others in the text of every error, and these may hold secrets.
        self._options = ReadOptions(
            select_files=select_files,
            rename_files=rename_files,
            ignore_zeros=ignore_zeros,
            end_marker=end_marker,
            on_error=on_error,
            storage_options=storage_options,
            timeout_s=timeout_s,
            retries=retries,
            read_ahead=read_ahead,
            limits=limits,
            safe=safe,
        )
        # Those that determine the members, for the description of the pipeline in a state.
        self.source = source
        self.select_files = select_files
        self.rename_files = rename_files
        self.ignore_zeros = ignore_zeros
        self.end_marker = end_marker
        self.on_error = on_error

    def __iter__(self) -> Iterator[Member]:
        for _, members in self.read_shards():
            yield from map(Member._make, members)

    def read_shards(self, resume: Resume | None = None) -> Iterator[ShardMembers]:
        """Yield the shards with their members as plain tuples, without torch's hook around each; for grouping.

        Args:
            resume: what a state has left to read, if not all.
        """
        warn_if_hidden(self.source)
        if resume is None:
            return read_shards(self.source, self._options)
        source = self.source if resume.deal is None else unsplit(self.source)
        return resume_shards(source, self._options, resume)
