"""Stages that group members into samples, and shuffle samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from random import Random
from typing import Any

from wds_datapipes.arguments import check_choice, check_fields, check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.samples.positioned_samples import PositionedSamples
from wds_datapipes.pipes.shards.loading import ShardReadingStage
from wds_datapipes.pipes.stage import BufferingStage, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey, SampleGrouping, split_by_shard
from wds_datapipes.samples.keys import KeyRule, check_key_rule, first_dot
from wds_datapipes.samples.shuffling import ShuffleState, shuffle_samples
from wds_datapipes.shards.loading import ShardMembers
from wds_datapipes.shards.position import Resume, SamplePosition
from wds_datapipes.types import Member, Sample


@register_stage("group_samples")
class SampleGrouper(PositionedSamples):
    """Group adjacent files with the same key into samples (functional name: ``group_samples``).

    A file's name is split at the first dot of its base name: ``train/0001.seg.png`` is the field ``seg.png`` of the
    sample ``train/0001``. Hidden files, files without a dot and files below a folder such as ``__meta__`` are ignored.
    The end of a shard always ends a sample; the last sample of a truncated shard is not yielded, since a field may be
    missing.

    Yields:
        dict[str, bytes]: ``__key__``, ``__url__`` (both ``str``), ``__local_path__`` (``str``, if the shard is a local
        file) and the fields in the order of the archive, without a leading dot.

    Args:
        source: yields `Member`.
        key_rule: splits a name into ``(key, field)``, or returns ``None`` to ignore the file: `first_dot`, `last_dot`
            or another function.
        fields: the fields to keep; samples without any of them are not yielded, and a warning says at the end of a
            pass that no sample had any. By default all fields.
        lowercase: convert the names of fields to lower case.
        on_duplicate: what to do if a field occurs twice in a sample: ``"raise"``, or keep the ``"first"`` or
            ``"last"``.
        on_repeated_key: what to do if files with the same key are not adjacent in a shard: ``"warn"`` once and yield
            them as separate samples, ``"raise"``, or ``"ignore"``. The first 65,536 keys of a shard are checked.
        on_error: ``"raise"``; or, to skip the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        EmptySourceError: a stage restarts this one repeatedly, but no item leaves the pipeline.
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
        return self.source if declared(self.source).reads_members else None

    def _make_grouping(self) -> SampleGrouping:
        return SampleGrouping(
            key_rule=self.key_rule,
            fields=self.fields,
            lowercase=self.lowercase,
            on_duplicate=self.on_duplicate,
            on_repeated_key=self.on_repeated_key,
            on_error=self.counted_errors,
        )

    def _read_shards(self, resume: Resume) -> Iterator[ShardMembers]:
        # torch's hook around each member would take a tenth of the time for small samples.
        reader = self.shard_reader
        return split_by_shard(self.source) if reader is None else iter(reader.open_reader(resume))


@register_stage("shuffle_samples")
class SampleShuffler(SeededStage, BufferingStage[Sample]):
    """Shuffle samples through a buffer of bounded size (functional name: ``shuffle_samples``).

    Each sample is yielded exactly once. Put it before decoding, while samples are small. The seed comes from the
    loader, as for torch's ``.shuffle()``, and differs in each epoch and worker. ``DataLoader(shuffle=False)`` disables
    it.

    Yields:
        Any: the items of ``source``, unchanged, in random order.

    Args:
        source: yields samples, or anything else.
        buffer_size: the number of samples in the buffer; 1 keeps the order.
        initial: the number of samples to buffer before the first is yielded; then two are read for each one yielded,
            until the buffer is full. By default ``buffer_size``; fewer start sooner, and mix the first samples less.
        max_bytes: the most bytes of values (bytes, arrays, tensors and images) in the buffer.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> sorted(IterableWrapper(range(5)).shuffle_samples(3))
        [0, 1, 2, 3, 4]
    """

    function = staticmethod(shuffle_samples)
    _enabled = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        buffer_size: int,
        *,
        initial: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        buffer_size = check_integer("buffer_size", buffer_size)
        initial = buffer_size if initial is None else initial
        if not 1 <= initial <= buffer_size:
            raise ValueError(f"shuffle_samples needs 1 <= initial <= buffer_size, not {initial} and {buffer_size}")
        self.initial = initial
        super().__init__(source, buffer_size=buffer_size, max_bytes=check_optional_integer("max_bytes", max_bytes, 0))
        self._rng = Random()

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples, the number of draws, and the current size of the buffer."""
        state = self._current()
        return {"draws": state.draws, "room": state.room, **super().snapshot()}

    def set_shuffle(self, shuffle: bool = True) -> SampleShuffler:
        """Turn shuffling on or off; loaders call this."""
        self._enabled = shuffle
        return self

    def reset(self) -> None:
        """Start an epoch, with the seed that was set for it or one from torch's generator."""
        self._rng.seed(self.take_seed())

    def __len__(self) -> int:
        """Return the number of items of an epoch in this process."""
        return len(self.source)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function in the iteration that begins."""
        known = super().function_options()
        if not self._enabled:
            known["buffer_size"] = 1
        return {"state": known.pop("buffer"), "rng": self._rng, **known}

    def _progress(
        self, state: Mapping[str, Any], waiting: Iterable[SamplePosition] = (), again: Iterable[SamplePosition] = ()
    ) -> ShuffleState:
        loaded = ShuffleState(state.get("room", self.initial if self._enabled else 1), waiting)
        loaded.draws = state.get("draws", 0)
        loaded.again = set(again)
        return loaded
