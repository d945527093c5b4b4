"""Shard writer: writes samples to numbered shards of limited size."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from wds_datapipes.errors import EncodeError, SampleError, StateError, UnsafeInputError
from wds_datapipes.io.compression.formats import Compress, find_compression
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.sinks import StreamSink, size_of
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.records.formats import FORMATS, format_of_name
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.header_writer import END, HeaderWriter
from wds_datapipes.types import PlacedSample, Sample, ShardInfo
from wds_datapipes.user_warnings import warn_user
from wds_datapipes.writing.journal import FinishedShard, KeyLog, ShardJournal, WriterClaim, compare_journals
from wds_datapipes.writing.record_writer import RecordPacker, RecordWriter
from wds_datapipes.writing.sample_packer import Encoder, TarSamplePacker
from wds_datapipes.writing.shard_file import Packer, ShardFile
from wds_datapipes.writing.shard_names import (
    check_pattern,
    describe_old_shards,
    find_journals,
    find_old_shards,
    journal_path,
    remove_old_shards,
)
from wds_datapipes.writing.tar_writer import TarWriter

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["OldShards", "ShardFormat", "ShardWriter", "write_wds_shards"]

LOG = logging.getLogger("wds_datapipes")

OldShards: TypeAlias = Literal["warn", "remove", "keep"]
ShardFormat: TypeAlias = Literal["tar", "jsonl", "msgpack", "cbor"]

#: The options of a `RecordWriter` among those of a `TarWriter`.
RECORD_OPTIONS = ("compress", "keep_meta", "key_rule", "storage_options", "digest")


class ShardWriter:
    """Writes samples to numbered shards, each of which appears when it is complete.

    It is a context manager. After an error or Ctrl-C, the finished shards remain, and the unfinished one is removed.
    Without samples, no shard is written. See `TarWriter` for the content of a shard.

    With ``resume=True``, finished shards are recorded in a journal next to them. After an interruption, the same call
    resumes: pass the same samples in the same order, and the writer skips those of finished shards without encoding
    them, and compares their keys; or call `skip_finished`, and start with the sample after them. The shards are
    identical, byte for byte, to those of an uninterrupted run.

    Args:
        pattern: path or URL with ``%06d`` or the like for the number.
        maxcount: the maximum number of samples per shard.
        maxsize: the maximum size of a shard in bytes before compression, including headers; a single sample may exceed
            it.
        start_shard: the number of the first shard.
        step: the difference between the numbers of consecutive shards, for writers that share a pattern.
        post: called with the name of each finished shard, for example to upload it.
        on_shard: called before ``post``, with the `ShardInfo` and a list of `PlacedSample`, the positions of all
            fields.
        opener: returns the stream to write to for a name; the writer closes it.
        verbose: log a line for each shard at level INFO to the logger ``wds_datapipes``.
        resume: keep a journal, and resume from it if it exists.
        journal: the path of the journal, a local file; for local shards, it is next to them by default.
        version_tag: identifies the source of the samples, such as the version of a program. It is recorded in the
            journal, and a conversion is only resumed with the same tag.
        digest: compute the SHA-256 of each shard, in a thread; it takes longer than writing large fields.
        index: write the index of each shard next to it, as `TarWriter` does.
        format: ``"tar"``, ``"jsonl"``, ``"msgpack"`` or ``"cbor"``; by default, the pattern's ending tells: records for
            those that ``load_wds_records`` reads, such as ``.jsonl.zst``, and tar for all others. See `RecordWriter`
            for record shards, which have no ``index``, ``user``, ``group``, ``mode`` and ``mtime``.
        old_shards: what to do with shards of an earlier run that had more of them, which would be read with the new
            ones: ``"warn"``, ``"remove"`` them, or ``"keep"`` them.
        user: as for `TarWriter`, like the following arguments.
        group: see `TarWriter`.
        mode: see `TarWriter`.
        mtime: see `TarWriter`.
        compress: see `TarWriter`.
        encoder: see `TarWriter`.
        keep_meta: see `TarWriter`.
        allow_pickle: see `TarWriter`.
        key_rule: see `TarWriter`.
        storage_options: see `TarWriter`.

    Attributes:
        shards: the `ShardInfo` of each finished shard, including those of earlier runs.
        old_shards: after `close`, the names of shards from an earlier run that still exist.

    Raises:
        ValueError: an argument is invalid.
        StateError: the journal belongs to another conversion; or, while writing, another process writes the same local
            shards. Writers that share a pattern with different first numbers do not conflict.

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
        *,
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        start_shard: int = 0,
        step: int = 1,
        post: Callable[[str], object] | None = None,
        on_shard: Callable[[ShardInfo, list[PlacedSample]], object] | None = None,
        opener: Callable[[str], BinaryIO] | None = None,
        verbose: bool = True,
        resume: bool = False,
        journal: str | os.PathLike[str] | None = None,
        version_tag: str = "",
        digest: bool = False,
        index: bool = False,
        format: ShardFormat | None = None,  # noqa: A002  as for load_wds_records
        old_shards: OldShards = "warn",
        user: str = "",
        group: str = "",
        mode: int = 0o644,
        mtime: float = 0,
        compress: Compress = None,
        encoder: Encoder = True,
        keep_meta: bool = False,
        allow_pickle: bool = False,
        key_rule: KeyRule | None = first_dot,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.pattern = check_pattern(pattern, maxcount=maxcount, maxsize=maxsize)
        if old_shards not in ("warn", "remove", "keep"):
            raise ValueError(f'old_shards must be "warn", "remove" or "keep", not {old_shards!r}')
        if start_shard < 0 or step < 1:
            raise ValueError(f"start_shard must be at least 0 and step at least 1, not {start_shard} and {step}")
        self._maxcount, self._maxsize = maxcount, maxsize
        if index and (opener is not None or key_rule is None):
            raise ValueError(
                "index=True needs file names, to write indexes next to the files, and a key_rule; it cannot be "
                "combined with an opener"
            )
        self._number, self._step = start_shard, step
        self._numbering = start_shard, step
        self._claim: WriterClaim | None = None
        self._post, self._on_shard, self._opener, self._verbose = post, on_shard, opener, verbose
        if (compression := find_compression(compress, self.pattern)) is not None:
            compression.compressor()  # raises if its package is not installed
        headers = HeaderWriter(user=user, group=group, mode=mode, mtime=mtime)
        if format is not None and format not in ("tar", *FORMATS):
            raise ValueError(f"format must be None, 'tar' or one of {', '.join(map(repr, FORMATS))}, not {format!r}")
        self._format = format_of_name(self.pattern) if format is None else FORMATS.get(format)
        self._packer: Packer
        if self._format is None:
            self._packer = TarSamplePacker(
                headers, encoder, allow_pickle=allow_pickle, keep_meta=keep_meta, key_rule=key_rule
            )
            self._end = END
        else:
            if index or (user, group, mode, mtime) != ("", "", 0o644, 0):
                raise ValueError(
                    f"index, user, group, mode and mtime belong to tar shards, and {redact(self.pattern)!r} is written "
                    f'as {self._format.title}. Leave them out, or pass format="tar"'
                )
            self._packer = RecordPacker(self._format, encoder, keep_meta=keep_meta)
            self._end = b""
        settings = {"user": user, "group": group, "mode": mode, "mtime": int(mtime), "compress": compress}
        self._options: dict[str, Any] = {
            **settings,
            "encoder": False,
            "keep_meta": keep_meta,
            "key_rule": key_rule,
            "storage_options": storage_options,
            "digest": digest,
            "index": index,
        }
        self._shard: ShardFile | None = None
        self._keys = KeyLog()
        self._journal: ShardJournal | None = None
        #: The finished shards of an earlier run whose samples were not passed again yet.
        self._to_skip: deque[FinishedShard] = deque()
        self.shards: list[ShardInfo] = []
        self._on_old_shards = old_shards
        self.old_shards: list[str] = []
        self._has_started = self._closed = False
        if resume:
            settings |= {
                "pattern": redact(self.pattern),
                "maxcount": maxcount,
                "maxsize": maxsize,
                "start_shard": start_shard,
            }
            if self._format is not None:
                settings["format"] = self._format.name
            settings |= {"step": step, "version_tag": version_tag, "index": index, "keep_meta": keep_meta}
            compare_journals(find_journals(self.pattern, journal), {"step": step, "version_tag": version_tag})
            self._journal = ShardJournal(journal_path(self.pattern, journal, start_shard, step), settings)
            self._resume(self._journal)

    def write(self, sample: Sample) -> None:
        """Write a sample, to the next shard if the current one is full.

        A refused sample leaves the shard unchanged, and writing can continue. After any other error, the writer is
        closed and the unfinished shard is removed.

        Raises:
            EncodeError, UnsafeInputError, MissingDependencyError, ShardWriteError: as `TarWriter.write`.
            StateError: a conversion was resumed with other samples.
        """
        if self._closed:
            raise ValueError(f"the writer of {redact(self.pattern)!r} is closed")
        self._has_started = True
        if self._to_skip:
            self._skip(sample)
            return
        try:
            packed = self._packer.pack(sample)
        except (SampleError, UnsafeInputError):
            self._record_key(sample)
            raise
        try:
            if self._shard is not None and self._shard.size + packed.size + len(self._end) > self._maxsize:
                self._finish(self._shard)
            self._record_key(sample)
            if self._shard is None:
                self._shard = self._open()
            self._shard.append(packed)
            if self._shard.samples >= self._maxcount:
                self._finish(self._shard)
        except EncodeError:
            raise
        except BaseException:
            self.discard()
            raise

    def skip_finished(self) -> int:
        """Return the number of samples in finished shards; `write` then expects the next one.

        Refused samples count too. Call it before the first `write`.
        """
        if self._has_started:
            raise ValueError("skip_finished must be called before the first sample is written")
        count = sum(shard.given for shard in self._to_skip)
        self._to_skip.clear()
        return count

    def close(self) -> None:
        """Finish the last shard.

        Raises:
            ShardWriteError: the shard cannot be finished, and was removed.
            StateError: a conversion was resumed with fewer samples than before.
        """
        if self._closed:
            return
        try:
            if self._shard is not None:
                self._finish(self._shard)
            if self._to_skip:
                raise StateError(
                    f"The conversion to {self.pattern!r} was resumed with fewer samples than before: those of "
                    f"{self._to_skip[0].info.url!r} are missing. Pass the same samples, or call skip_finished()"
                )
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
        if self._claim is not None:
            self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _handle_old_shards(self) -> None:
        """Apply ``old_shards`` to the shards of an earlier run."""
        storage_options = self._options["storage_options"]
        found = find_old_shards(self.pattern, self._number, self._step, storage_options)
        if self._on_old_shards == "remove":
            remove_old_shards(found, storage_options)
            return
        self.old_shards = found
        if found and self._on_old_shards == "warn":
            warn_user(f'{describe_old_shards(found)}. Remove them, or pass old_shards="remove"')

    def _open(self) -> ShardFile:
        if self._claim is None and self._opener is None and local_path(self.pattern) is not None:
            self._claim = WriterClaim(journal_path(self.pattern, None, *self._numbering), self.pattern)
        url = self.pattern % self._number
        target: Any = url if self._opener is None else StreamSink(self._opener(url), url, close=True)
        if self._format is None:
            return TarWriter(target, **self._options)
        options = {name: self._options[name] for name in RECORD_OPTIONS}
        return RecordWriter(target, format=self._format.name, **options)

    def _finish(self, shard: ShardFile) -> None:
        shard.close()
        info = shard.info
        assert info is not None  # noqa: S101  it was closed without an error
        if self._on_shard is not None:
            self._on_shard(info, shard.layout)
        if self._post is not None:
            self._post(info.url)
        if self._journal is not None:
            self._journal.add(FinishedShard(self._number, info, self._keys.count, self._keys.digest()))
        if self._verbose:
            LOG.info("Wrote %s: %d samples, %d bytes", redact(info.url), info.samples, info.bytes)
        self.shards.append(info)
        self._shard = None
        self._keys = KeyLog()
        self._number += self._step

    def _resume(self, journal: ShardJournal) -> None:
        """Resume after the first shards of the journal that exist without a gap."""
        for count, recorded in enumerate(journal.finished):
            info = recorded.info._replace(url=self.pattern % self._number)  # with its credentials
            shard = recorded._replace(info=info)
            # Do not check the file if there is a post function, which may have moved it.
            found = (
                shard.info.bytes
                if self._post is not None
                else size_of(shard.info.url, self._options["storage_options"])
            )
            if shard.number != self._number or found != shard.info.bytes:
                journal.truncate(count)
                break
            self._to_skip.append(shard)
            self.shards.append(shard.info)
            self._number += self._step

    def _record_key(self, sample: Sample) -> None:
        if self._journal is not None:  # otherwise not needed
            self._keys.add(sample)

    def _skip(self, sample: Sample) -> None:
        shard = self._to_skip[0]
        self._keys.add(sample)
        if self._keys.count < shard.given:
            return
        if self._keys.digest() != shard.keys:
            self.discard()
            raise StateError(
                f"The conversion to {self.pattern!r} was resumed with other samples: those of {shard.info.url!r} had "
                f"other keys or another order. Pass the same samples in the same order, or start again"
            )
        self._keys = KeyLog()
        self._to_skip.popleft()


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
            while yielded < len(writer.shards):
                yield writer.shards[yielded]
                yielded += 1
    yield from writer.shards[yielded:]
    policy.finish()
