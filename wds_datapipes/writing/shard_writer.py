"""Write samples to numbered shards of limited size."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from wds_datapipes.arguments import check_choice, check_integer, checks_calls
from wds_datapipes.errors import EncodeError, SampleError, UnsafeInputError, plural
from wds_datapipes.hints import OLD_SHARDS, Message
from wds_datapipes.io.compression.formats import find_compression
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.output.sink import size_of
from wds_datapipes.io.output.stream import StreamSink
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.tar.header_writer import END
from wds_datapipes.types import ALONE, Instance, Sample, ShardInfo
from wds_datapipes.user_warnings import warn_user
from wds_datapipes.writing.closable_writer import ClosableWriter
from wds_datapipes.writing.journal import FinishedShard, compare_journals
from wds_datapipes.writing.options import DEFAULT_WRITING, WriteOptions
from wds_datapipes.writing.resumption import SampleJournal, lock_shards
from wds_datapipes.writing.shard_file import ShardFile
from wds_datapipes.writing.shard_names import (
    check_pattern,
    describe_old_shards,
    fill_pattern,
    find_journals,
    find_old_shards,
    journal_path,
    remove_old_shards,
    shard_numbers,
)

if TYPE_CHECKING:
    from typing_extensions import Self


LOG = logging.getLogger("wds_datapipes")

#: A writer that writes all shards.

OldShards: TypeAlias = Literal["warn", "remove", "keep"]


@checks_calls
class ShardWriter(ClosableWriter):
    """Writes samples to numbered shards; each appears once it is complete.

    It is a context manager. After an error or Ctrl-C, finished shards remain and the unfinished one is removed. A
    writer that is not closed loses the unfinished one, with a warning. Without samples, no shard is written. See
    `TarWriter` for the content of a shard.

    With ``resume=True``, finished shards are recorded in a journal next to them. After an interruption, repeat the same
    call to resume. Either pass the same samples in the same order: the writer skips those of finished shards without
    encoding them, and compares their keys. Or call `skip_finished` and start with the sample after them. The shards
    are identical, byte for byte, to those of an uninterrupted run.

    Args:
        pattern: the path or URL with ``%06d`` or similar for the number.
        maxcount: the maximum number of samples per shard; ``float("inf")`` means no limit.
        maxsize: the maximum size of a shard in bytes before compression, including headers; a single sample may exceed
            it.
        post: called with the name of each finished shard, for example to upload it.
        start_shard: the number of the first shard.
        verbose: log a line for each shard to the logger ``wds_datapipes``, at the level INFO.
        opener: a function that returns a writable stream for a name; the writer closes it.
        old_shards: what to do with the additional shards of an earlier, longer run, which would be read with the new
            ones: ``"warn"``, ``"remove"`` them, or ``"keep"`` them.
        resume: keep a journal, and resume from it if it exists: ``True`` for a file next to local shards, or the path
            of a local file.
        share: the rank and the worker of this writer, if several writers use the same pattern. ``{rank}`` and
            ``{worker}`` in it are replaced by their numbers; writers with the same pattern use every n-th number.
        options: how the bytes of the shards are written: ``WriteOptions(compress=, encoder=, index=...)``.

    Attributes:
        shards: the `ShardInfo` of each finished shard, including those of earlier runs.
        old_shards: after `close`, the names of shards from an earlier run that still exist.

    Raises:
        ValueError: an argument is invalid.
        StateError: the journal belongs to another conversion; or, during writing, another process is writing the same
            local shards. Writers that share a pattern but have different first numbers do not conflict.

    Examples:
        >>> with ShardWriter("train-%03d.tar", maxcount=2) as writer:
        ...     for number in range(5):
        ...         writer.write({"__key__": f"{number:06d}", "txt": f"sample {number}"})
        >>> [(shard.url, shard.samples) for shard in writer.shards]
        [('train-000.tar', 2), ('train-001.tar', 2), ('train-002.tar', 1)]
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        maxcount: float = 100_000,
        maxsize: float = 3e9,
        post: Callable[[str], object] | None = None,
        start_shard: int = 0,
        verbose: bool = True,
        opener: Callable[[str], BinaryIO] | None = None,
        *,
        old_shards: OldShards = "warn",
        resume: bool | str | os.PathLike[str] = False,
        share: Instance = ALONE,
        options: WriteOptions = DEFAULT_WRITING,
    ) -> None:
        self._options = options
        every_pattern = check_pattern(pattern, maxcount=maxcount, maxsize=maxsize)
        check_choice("old_shards", old_shards, OldShards)
        start_shard = check_integer("start_shard", start_shard, 0)
        if self._options.index and opener is not None:
            raise ValueError("index=True needs file names, to write indexes next to the files, but there is an opener")
        self.pattern = fill_pattern(every_pattern, share)
        self._maxcount, self._maxsize = maxcount, maxsize
        first, self._step = shard_numbers(every_pattern, share)
        self._number = start_shard + first
        self._writer_numbers = self._number, self._step
        self._post, self._opener, self._verbose = post, opener, verbose
        if (compression := find_compression(self._options.compress, self.pattern)) is not None:
            compression.compressor()  # raises if its package is not installed
        self._packer = self._options.packer()
        self._shard: ShardFile | None = None
        self._lock: ExitStack | None = None
        self.shards: list[ShardInfo] = []
        self._on_old_shards = old_shards
        self.old_shards: list[str] = []
        self._has_started = False
        self._journal: SampleJournal | None = None
        if resume:
            journal = None if resume is True else os.fspath(resume)
            writers = {"writers": f"{share.workers} workers on each of {share.ranks} ranks"}
            compare_journals(find_journals(every_pattern, journal), writers)
            own = None if journal is None else fill_pattern(journal, share)
            settings = {
                "pattern": redact(self.pattern),
                "maxcount": maxcount,
                "maxsize": maxsize,
                "start_shard": start_shard,
                **writers,
                **self._options.tar_settings,
                **{name: getattr(self._options, name) for name in ("compress", "index", "keep_meta")},
            }
            path = journal_path(self.pattern, own, *self._writer_numbers)
            self._journal = SampleJournal(path, settings, self.pattern)
            self.shards = self._journal.resume(self._find_next)
        self.expect_close()

    def write(self, sample: Sample) -> None:
        """Write a sample to the current shard, or to the next one if the current shard is full.

        A rejected sample leaves the shard unchanged, and writing can continue. After any other error, the writer is
        closed and the unfinished shard is removed.

        Raises:
            EncodeError, UnsafeInputError, MissingDependencyError, ShardWriteError: as `TarWriter.write`.
            StateError: a conversion was resumed with different samples.
        """
        if self._closed:
            raise ValueError(f"the writer of {redact(self.pattern)!r} is closed")
        self._has_started = True
        try:
            if self._journal is not None and self._journal.skip(sample):
                return
            try:
                packed = self._packer.pack(sample)
                if self._shard is not None and self._shard.size + packed.size + len(END) > self._maxsize:
                    self._finish(self._shard)
            finally:
                if self._journal is not None:  # a rejected sample counts too
                    self._journal.add(sample)
            if self._shard is None:
                self._shard = self._open()
            self._shard.append(packed)
            if self._shard.samples >= self._maxcount:
                self._finish(self._shard)
        except (SampleError, UnsafeInputError):
            raise
        except BaseException:
            self.discard()
            raise

    def skip_finished(self) -> int:
        """Return the number of samples in finished shards; `write` then expects the sample after them.

        Rejected samples count too. Call this before the first `write`.
        """
        if self._has_started:
            raise ValueError("skip_finished must be called before the first sample is written")
        return 0 if self._journal is None else self._journal.skip_all()

    def close(self) -> None:
        """Finish the last shard.

        Raises:
            ShardWriteError: the shard cannot be finished and was removed.
            StateError: a conversion was resumed with fewer samples than before.
        """
        if self._closed:
            return
        try:
            if self._shard is not None:
                self._finish(self._shard)
            if self._journal is not None:
                self._journal.check_end()
            if self.shards and self._opener is None:
                self._handle_old_shards()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the writer and remove the unfinished shard; the finished ones remain."""
        self._closed = True
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            self._lock.close()

    def describe_loss(self) -> str:
        """Describe the shard that is not finished."""
        return "" if self._shard is None else self._shard.describe_loss()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _handle_old_shards(self) -> None:
        """Apply ``old_shards`` to the shards of an earlier run."""
        storage_options = self._options.storage_options
        found = find_old_shards(self.pattern, self._number, self._step, storage_options)
        if self._on_old_shards == "remove":
            remove_old_shards(found, storage_options)
            return
        self.old_shards = found
        if found and self._on_old_shards == "warn":
            warn_user(Message(f"{describe_old_shards(found)}. Remove them, or ", OLD_SHARDS))

    def _open(self) -> ShardFile:
        if self._lock is None:
            self._lock = ExitStack()
            if self._opener is None and local_path(self.pattern) is not None:
                journal = journal_path(self.pattern, None, *self._writer_numbers)
                self._lock.enter_context(lock_shards(journal, self.pattern))
        url = self.pattern % self._number
        target: Any = url if self._opener is None else StreamSink(self._opener(url), url, close=True)
        return ShardFile(target, self._options, self._packer)

    def _finish(self, shard: ShardFile) -> None:
        shard.close()
        info = shard.info
        assert info is not None  # noqa: S101  it was closed without an error
        if self._post is not None:
            self._post(info.url)
        if self._journal is not None:
            self._journal.finish(self._number, info)
        if self._verbose:
            LOG.info("Wrote %s: %s, %d bytes", redact(info.url), plural(info.samples, "sample"), info.bytes)
        self.shards.append(info)
        self._shard = None
        self._number += self._step

    def _find_next(self, recorded: FinishedShard) -> ShardInfo | None:
        """Return a recorded shard if it exists and is the next one, without a gap."""
        info = recorded.info._replace(url=self.pattern % self._number)  # with its credentials
        # A post function may have moved the file.
        size = info.bytes if self._post is not None else size_of(info.url, self._options.storage_options)
        if recorded.number != self._number or size != info.bytes:
            return None
        self._number += self._step
        return info


def write_wds_shards(
    source: Iterable[Sample], pattern: str | os.PathLike[str], *, on_error: OnError = "raise", **options: Any
) -> Iterator[ShardInfo]:
    """Write samples and yield each finished shard; the options are those of `ShardWriter`."""
    check_on_error(on_error)
    policy = ErrorPolicy(on_error, "write_wds_shards")
    yielded = 0
    with ShardWriter(pattern, **options) as writer:
        for sample in policy.counted(source):
            try:
                writer.write(sample)
            except EncodeError as error:
                if policy.handle(error, sample):
                    continue
                break
            try:
                yield from writer.shards[yielded:]
            except GeneratorExit:
                if loss := writer.describe_loss():
                    warn_user(f"{loss} discarded, because iteration over write_wds_shards stopped. Iterate to the end")
                raise
            yielded = len(writer.shards)
    yield from writer.shards[yielded:]
    policy.finish()
