"""The stage ``.load_wds_records()``: read shards of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wds_datapipes.arguments import check_fields
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.io.prefetch import READ_AHEAD_BYTES
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.timeouts import Timeouts
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.samples.positioned_samples import PositionedSamples
from wds_datapipes.pipes.shards.shard_reading import ShardReadingStage
from wds_datapipes.samples.grouping import RecordGrouping
from wds_datapipes.shards.loading import ShardMembers
from wds_datapipes.shards.position import Resume
from wds_datapipes.shards.records import KEY, FormatName, RecordOptions
from wds_datapipes.types import Sample


class RecordLoader(PositionedSamples, ShardReadingStage[Sample]):
    r"""Read a sample from each record of each shard (functional name: ``load_wds_records``).

    A record shard is a file of JSON lines, or of concatenated msgpack or CBOR values. Each value is a map of fields.
    Shards are opened as by ``load_wds_shards``: local files, URLs, ``pipe:`` and standard input, compressed or not. No
    ``group_samples`` follows, and no decoding is needed, because the values are typed. None of the formats can run
    code.

    One record is read ahead. A shard that was truncated exactly between two records cannot be distinguished from a
    shorter one, unless it is compressed or its server reports its size.

    Yields:
        dict[str, Any]: ``__key__``, ``__url__`` (both ``str``), ``__local_path__`` (``str``, if the shard is a local
        file) and the fields of the record, in its order.

    Args:
        source: yields the URL of each shard.
        format: ``"jsonl"``, ``"msgpack"`` or ``"cbor"``. By default, the extension of each shard determines it:
            ``.jsonl``, ``.ndjson`` or ``.jsonlines``; ``.msgpack``, ``.msgpacks``, ``.mps`` or ``.mp``; ``.cbor`` or
            ``.cbors``; and these with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``.
        key: the field with the key, a string or an integer. By default ``__key__``; the key of a record without this
            field is its offset in the uncompressed shard, in bytes.
        fields: the names of the values, for records that are lists of values.
        on_error: ``"raise"``, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler. All but the first skip a record
            that has an end but no usable value, or else the rest of the shard; a budget counts either as one item.
        storage_options: options for fsspec to open the shards, such as credentials.
        timeout_s: as for ``load_wds_shards``, in seconds.
        retries: as for ``load_wds_shards``.
        read_ahead: as for ``load_wds_shards``, in bytes.
        open_shards: the number of shards that are open at the same time; one sample from each is yielded in turn.
        limits: ``member_bytes`` limits the size of a record, and ``tail_bytes`` and ``expansion`` limit compressed
            shards; see `ReadLimits`.
        allow_local_files: False opens only files on a network; pass it to `ShardList` as well.

    Raises:
        SpecError: the name of a shard does not determine its format, and ``format`` is not given.
        DecodeError: a record is not a map of fields, or cannot be decoded.
        MissingFieldError: a record has no field ``key``.
        TruncatedShardError: a shard ends inside a record, or is empty.
        CorruptShardError: a shard is not in the format.
        ReadLimitError: a record is too large, or nests its values too deeply; or a compressed shard expands too much.
        ShardOpenError: a shard does not exist, or access is denied.
        ShardReadError: a ``pipe:`` command failed, even if all records are complete; or the disk, the store or the
            network failed.
        ChangedShardError: a shard was replaced while it was read, or since a state was saved; no ``on_error`` skips it.
        UnsafeInputError: a shard is a local file or a command, and ``allow_local_files`` is False; no ``on_error``
            skips this.
        MissingDependencyError: the format needs the extra ``msgpack`` or ``cbor``.
        RuntimeError: ``open_shards`` is greater than 1, but the shards come from `DirectoryShards`.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("a.jsonl").write_text('{"id": 7, "text": "a cat"}\n{"id": 8, "text": "a dog"}\n')
        >>> list(ShardList("a.jsonl").load_wds_records(key="id"))[1]
        {'__key__': '8', '__url__': 'a.jsonl', '__local_path__': 'a.jsonl', 'id': 8, 'text': 'a dog'}
    """

    def __init__(
        self,
        source: IterDataPipe[str],
        *,
        format: FormatName | None = None,  # noqa: A002  as in pandas and fsspec
        key: str = KEY,
        fields: Sequence[str] | None = None,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float | Timeouts | None = None,
        retries: int | None = None,
        read_ahead: int = READ_AHEAD_BYTES,
        open_shards: int = 1,
        limits: ReadLimits = DEFAULT_LIMITS,
        allow_local_files: bool = True,
    ) -> None:
        super().__init__()
        check_fields(fields)
        names = None if fields is None else tuple(fields)
        options = RecordOptions(
            format=format,
            key=key,
            fields=names,
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

    @property
    def shard_reader(self) -> ShardReadingStage[Any]:
        """This stage, which reads the shards itself."""
        return self

    def _make_grouping(self) -> RecordGrouping:
        return RecordGrouping()

    def _read_shards(self, resume: Resume) -> Iterator[ShardMembers]:
        return iter(self.open_reader(resume))
