"""The stage ``.group_samples()``: group the members of shards into samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from wds_datapipes.arguments import check_choice, check_fields
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.samples.positioned_samples import PositionedSamples
from wds_datapipes.pipes.shards.shard_reading import ShardReadingStage
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey, SampleGrouping, split_by_shard
from wds_datapipes.samples.keys import KeyRule, check_key_rule, first_dot
from wds_datapipes.shards.loading import ShardMembers
from wds_datapipes.shards.position import Resume
from wds_datapipes.types import Member


class SampleGrouper(PositionedSamples):
    """Group adjacent files with the same key into samples (functional name: ``group_samples``).

    A file's name is split at the first dot of its base name: ``train/0001.seg.png`` is the field ``seg.png`` of the
    sample ``train/0001``. Hidden files, files without a dot and files below a folder such as ``__meta__`` are ignored.
    The end of a shard always ends a sample. The last sample of a truncated shard is not yielded, because a field may be
    missing, unless the shard breaks off in the data of a file of the next sample.

    Yields:
        dict[str, bytes]: ``__key__``, ``__url__`` (both ``str``), ``__local_path__`` (``str``, if the shard is a local
        file) and the fields in the order of the archive, without a leading dot.

    Args:
        source: yields `Member`.
        key_rule: a function that splits a name into ``(key, field)``, or returns ``None`` to ignore the file, such as
            `first_dot` or `last_dot`.
        fields: the fields to keep. Samples with none of them are not yielded; if no sample of a pass has any, there is
            a warning at its end. By default, all fields.
        lowercase: convert field names to lower case.
        on_duplicate: what to do if a field occurs twice in a sample: ``"raise"``, or keep the ``"first"`` or
            ``"last"``.
        on_repeated_key: what to do if files with the same key are not adjacent in a shard: ``"warn"`` once and yield
            them as separate samples, ``"raise"``, or ``"ignore"``. The first 65,536 keys of a shard are checked.
        on_error: ``"raise"``; or, to skip the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        EmptySourceError: a stage restarts this stage repeatedly, but no item leaves the pipeline.
        DuplicateKeyError: a field occurs twice in a sample; or files with the same key are not adjacent, and
            ``on_repeated_key`` is ``"raise"``.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": "a", "txt": b"one", "cls": b"1"}])
        >>> list(ShardList(shard).load_wds_shards().group_samples(fields=["cls"]))
        [{'__key__': 'a', '__url__': 'train.tar', '__local_path__': 'train.tar', 'cls': b'1'}]
    """

    def __init__(
        self,
        source: IterDataPipe[Member],
        *,
        key_rule: KeyRule = first_dot,
        fields: Collection[str] | None = None,
        lowercase: bool = True,
        on_duplicate: OnDuplicate = "raise",
        on_repeated_key: OnRepeatedKey = "warn",
        on_error: OnError = "raise",
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        check_key_rule(key_rule)
        check_fields(fields)
        check_choice("on_duplicate", on_duplicate, OnDuplicate)
        check_choice("on_repeated_key", on_repeated_key, OnRepeatedKey)
        self.source = source
        self.key_rule = key_rule
        self.fields = fields
        self.lowercase = lowercase
        self.on_duplicate = on_duplicate
        self.on_repeated_key = on_repeated_key
        self.on_error = on_error

    @property
    def shard_reader(self) -> ShardReadingStage[Any] | None:
        """The stage that reads the shards, if it comes directly before this one."""
        reader: ShardReadingStage[Any] | None = declared(self.source).member_reader()
        return reader

    def _make_grouping(self) -> SampleGrouping:
        rules = ("key_rule", "fields", "lowercase", "on_duplicate", "on_repeated_key")
        return SampleGrouping(**{name: getattr(self, name) for name in rules}, on_error=self.counted_errors)

    def _read_shards(self, resume: Resume) -> Iterator[ShardMembers]:
        # For small samples, torch's hook around each member would take a tenth of the time.
        reader = self.shard_reader
        return split_by_shard(self.source) if reader is None else iter(reader.open_reader(resume))
