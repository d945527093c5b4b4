"""Shard writer: writes samples to numbered shards, each up to a limit."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from wds_datapipes.errors import EncodeError, SampleError, StateError, UnwritableSampleError
from wds_datapipes.io.compression.compress import Compress, find_compressor
from wds_datapipes.io.openers import local_path
from wds_datapipes.io.sinks import StreamSink, size_of
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.header_writer import END, HeaderWriter
from wds_datapipes.types import PlacedSample, Sample, ShardInfo
from wds_datapipes.user_warnings import warn_user
from wds_datapipes.writing.journal import FinishedShard, KeyLog, ShardJournal, WriterClaim, compare_journals
from wds_datapipes.writing.sample_packer import Encoder, SamplePacker
from wds_datapipes.writing.shard_names import (
    check_pattern,
    describe_old_shards,
    find_old_shards,
    journal_path,
    journals_of_all,
    remove_old_shards,
)
from wds_datapipes.writing.tar_writer import TarWriter

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["OldShards", "ShardWriter", "write_wds_shards"]

LOG = logging.getLogger("wds_datapipes")

OldShards: TypeAlias = Literal["warn", "remove", "keep"]


class ShardWriter:
    """Writes samples to numbered shards, each of which appears when it is complete.

    It is a context manager. When an error or Ctrl-C ends it, the finished shards stay, and nothing is left of the one
    that was being written. Without samples, no shard is written. `TarWriter` tells what a shard is made of.

    With ``resume=True``, a journal next to the shards has a line for each finished one. After any interruption, the
    same call resumes it: give it the same samples in the same order, and it skips those of the finished shards,
    without encoding them, and compares their keys; or call `skip_finished`, and begin with the sample after them. The
    shards are then the same, byte for byte, as without the break.

    Args:
        pattern: path or URL with ``%06d`` or the like, for the number.
        maxcount: how many samples a shard has at most.
        maxsize: how many bytes a shard has at most before it is compressed, with all headers; a single sample may
            be larger.
        start_shard: the first number.
        step: what is added to the number from one shard to the next; writers that share a pattern use it.
        post: is called with the name of each shard after it is finished, to upload it, for example.
        on_shard: is called before that, with the `ShardInfo` and a list of `PlacedSample`, which tells where in the
            archive all fields are.
        opener: returns the stream to write to for a name; the writer closes it.
        verbose: log a line for each shard, of the level INFO, to the logger ``wds_datapipes``.
        resume: keep a journal, and resume from it if there is one.
        journal: the path of the journal, a local file; for local shards, it is next to them by default.
        version_tag: identifies what makes the samples, such as the version of a program. It is kept in the journal, and
            a conversion is resumed only with the same one.
        digest: compute the SHA-256 of each shard.
        index: write the index of each shard beside it, as `TarWriter` does.
        old_shards: what to do with shards of an earlier run that had more of them, which stand where the next ones of
            this writer would, and would be read with the new ones: ``"warn"``, ``"remove"`` them, or ``"keep"`` them.
        user: as for `TarWriter`, and so are those that follow.
        group: see there.
        mode: see there.
        mtime: see there.
        compress: see there.
        encoder: see there.
        keep_meta: see there.
        unsafe: see there.
        key_rule: see there.
        storage_options: see there.

    Attributes:
        shards: the `ShardInfo` of each finished shard, those of earlier runs too.
        old_shards: after `close`, the names of the shards of an earlier run that are still there.

    Raises:
        ValueError: an argument makes no sense.
        StateError: the journal is of another conversion. Or, while writing, another process writes the same local
            shards; writers that share a pattern and begin at different numbers are not compared.

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
        digest: bool = True,
        index: bool = False,
        old_shards: OldShards = "warn",
        user: str = "",
        group: str = "",
        mode: int = 0o644,
        mtime: float = 0,
        compress: Compress = None,
        encoder: Encoder = True,
        keep_meta: bool = False,
        unsafe: bool = False,
        key_rule: KeyRule | None = first_dot,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.pattern = check_pattern(pattern, maxcount=maxcount, maxsize=maxsize)
        if old_shards not in ("warn", "remove", "keep"):
            raise ValueError(f'old_shards is "warn", "remove" or "keep", not {old_shards!r}')
        if start_shard < 0 or step < 1:
            raise ValueError(f"start_shard is a number from 0, and step one from 1, not {start_shard} and {step}")
        self._maxcount, self._maxsize = maxcount, maxsize
        if index and (opener is not None or key_rule is None):
            raise ValueError(
                "index=True needs file names, for indexes next to the files, and a key_rule; not an opener"
            )
        self._number, self._step = start_shard, step
        self._place = start_shard, step
        self._claim: WriterClaim | None = None
        self._post, self._on_shard, self._opener, self._verbose = post, on_shard, opener, verbose
        find_compressor(compress, self.pattern)
        headers = HeaderWriter(user=user, group=group, mode=mode, mtime=mtime)
        self._packer = SamplePacker(headers, encoder, unsafe=unsafe, keep_meta=keep_meta, key_rule=key_rule)
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
        self._shard: TarWriter | None = None
        self._given = KeyLog()
        self._journal: ShardJournal | None = None
        #: The finished shards of an earlier run whose samples have not come by yet.
        self._ahead: deque[FinishedShard] = deque()
        self.shards: list[ShardInfo] = []
        self._on_old_shards = old_shards
        self.old_shards: list[str] = []
        self._begun = self._closed = False
        if resume:
            kept = {"pattern": self.pattern, "maxcount": maxcount, "maxsize": maxsize, "start_shard": start_shard}
            kept |= {"step": step, "version_tag": version_tag, "index": index, "keep_meta": keep_meta, **settings}
            compare_journals(journals_of_all(self.pattern, journal), {"step": step, "version_tag": version_tag})
            self._journal = ShardJournal(journal_path(self.pattern, journal, start_shard, step), kept)
            self._go_on(self._journal)

    def write(self, sample: Sample) -> None:
        """Write a sample, to the next shard if the current one is full.

        A sample that is refused leaves nothing, and the writer can continue. After any other error, it is closed, and
        nothing is left of the shard that was being written.

        Raises:
            EncodeError, UnwritableSampleError, UnsafeCodecError, MissingDependencyError: as `TarWriter.write`.
            ShardWriteError, CommandError: the same.
            StateError: a conversion was resumed with other samples.
        """
        if self._closed:
            raise ValueError(f"the writer of {self.pattern!r} is closed, and takes no more samples")
        self._begun = True
        if self._ahead:
            self._pass_over(sample)
            return
        try:
            packed = self._packer.pack(sample)
        except SampleError:
            self._note(sample)
            raise
        try:
            if self._shard is not None and self._shard.size + packed.size + len(END) > self._maxsize:
                self._finish(self._shard)
            self._note(sample)
            if self._shard is None:
                self._shard = self._open()
            self._shard.append(packed)
            if self._shard.samples >= self._maxcount:
                self._finish(self._shard)
        except UnwritableSampleError:
            raise
        except BaseException:
            self.discard()
            raise

    def skip_finished(self) -> int:
        """Return the number of samples that an earlier run has finished; `write` then takes the next one.

        Samples that were refused count too. Call it before the first `write`.
        """
        if self._begun:
            raise ValueError("skip_finished returns where to begin, so call it before the first sample is written")
        count = sum(shard.given for shard in self._ahead)
        self._ahead.clear()
        return count

    def close(self) -> None:
        """Finish the last shard.

        Raises:
            ShardWriteError, CommandError: that failed, and nothing is left of it.
            StateError: a conversion was resumed with fewer samples than were written before.
        """
        if self._closed:
            return
        try:
            if self._shard is not None:
                self._finish(self._shard)
            if self._ahead:
                raise StateError(
                    f"The conversion to {self.pattern!r} was resumed with fewer samples than it had: the ones of "
                    f"{self._ahead[0].info.url!r} have not come. Give it the same samples, or call skip_finished()"
                )
            if self.shards and self._opener is None:
                self._look_for_old_shards()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the writer, and remove the unfinished shard; the finished ones stay."""
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

    def _look_for_old_shards(self) -> None:
        """Handle shards of an earlier run, as ``old_shards`` says."""
        storage_options = self._options["storage_options"]
        found = find_old_shards(self.pattern, self._number, self._step, storage_options)
        if self._on_old_shards == "remove":
            remove_old_shards(found, storage_options)
            return
        self.old_shards = found
        if found and self._on_old_shards == "warn":
            warn_user(f'{describe_old_shards(found)}. Remove them, or pass old_shards="remove"')

    def _open(self) -> TarWriter:
        if self._claim is None and self._opener is None and local_path(self.pattern) is not None:
            self._claim = WriterClaim(journal_path(self.pattern, None, *self._place), self.pattern)
        url = self.pattern % self._number
        target: Any = url if self._opener is None else StreamSink(self._opener(url), url, close=True)
        return TarWriter(target, **self._options)

    def _finish(self, shard: TarWriter) -> None:
        shard.close()
        info = shard.info
        assert info is not None  # noqa: S101  it was closed without an error
        if self._on_shard is not None:
            self._on_shard(info, shard.layout)
        if self._post is not None:
            self._post(info.url)
        if self._journal is not None:
            self._journal.add(FinishedShard(self._number, info, self._given.count, self._given.digest()))
        if self._verbose:
            LOG.info("wrote %s: %d samples, %d bytes", info.url, info.samples, info.bytes)
        self.shards.append(info)
        self._shard = None
        self._given = KeyLog()
        self._number += self._step

    def _go_on(self, journal: ShardJournal) -> None:
        """Resume after the shards of the journal that exist, from the first on."""
        for count, shard in enumerate(journal.finished):
            # What post has done with a shard, such as moving it away, is not known here.
            found = (
                shard.info.bytes
                if self._post is not None
                else size_of(shard.info.url, self._options["storage_options"])
            )
            if shard.number != self._number or found != shard.info.bytes:
                journal.keep(count)
                break
            self._ahead.append(shard)
            self.shards.append(shard.info)
            self._number += self._step

    def _note(self, sample: Sample) -> None:
        if self._journal is not None:  # which is not used otherwise
            self._given.add(sample)

    def _pass_over(self, sample: Sample) -> None:
        shard = self._ahead[0]
        self._given.add(sample)
        if self._given.count < shard.given:
            return
        if self._given.digest() != shard.keys:
            self.discard()
            raise StateError(
                f"The conversion to {self.pattern!r} was resumed with other samples: those of {shard.info.url!r} had "
                f"other keys, or another order. Give it the same samples in the same order, or start again"
            )
        self._given = KeyLog()
        self._ahead.popleft()


def write_wds_shards(
    source: Iterable[Sample], pattern: str | os.PathLike[str], *, on_error: OnError = "raise", **options: Any
) -> Iterator[ShardInfo]:
    """Write samples, and yield each shard when it is finished; the options are those of `ShardWriter`."""
    check_on_error(on_error)
    policy = ErrorPolicy(on_error, "write_wds_shards")
    told = 0
    with ShardWriter(pattern, **options) as writer:
        for sample in policy.counted(source):
            try:
                writer.write(sample)
            except (EncodeError, UnwritableSampleError) as error:
                if policy.goes_on(error, sample):
                    continue
                break
            while told < len(writer.shards):
                yield writer.shards[told]
                told += 1
    yield from writer.shards[told:]
    policy.finish()
