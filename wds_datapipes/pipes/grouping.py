"""Stages that group members into samples, and shuffle samples."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from random import Random
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.loading import ShardLoader
from wds_datapipes.pipes.sharding import rotation_period
from wds_datapipes.pipes.stage import OpaqueValue, RecordedStage, position_reader_of, register_stage
from wds_datapipes.pipes.state.empty_passes import EmptyPassGuard
from wds_datapipes.pipes.state.recording import Form, Recorder
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.pipes.state.shard_order import Seen, ShardOrder, check_seen, listings_before
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey, SampleGrouping, check_next_key, split_by_shard
from wds_datapipes.samples.interleaving import interleave_samples
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.samples.shuffling import ShuffleState, shuffle_samples
from wds_datapipes.shards.position import (
    END_OF_SHARDS,
    Progress,
    Resume,
    SamplePosition,
    ShardShare,
    unpack_open_shards,
    unpack_positions,
)
from wds_datapipes.types import Member, Sample

__all__ = ["SampleGrouper", "SampleShuffler"]


@register_stage("group_samples")
class SampleGrouper(RecordedStage[Sample]):
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
        fields: the fields to keep; samples without any of them are not yielded. By default all fields.
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

    has_position = True
    can_reshard = True

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
        if not callable(key_rule):
            raise TypeError(f"key_rule must be first_dot, last_dot or another function of a name, not {key_rule!r}")
        if isinstance(fields, str):
            raise TypeError(f'fields must be a collection of names, as in ["jpg", "cls"], not the string {fields!r}')
        if on_duplicate not in ("raise", "first", "last"):
            raise ValueError(f'on_duplicate must be "raise", "first" or "last", not {on_duplicate!r}')
        if on_repeated_key not in ("warn", "raise", "ignore"):
            raise ValueError(f'on_repeated_key must be "warn", "raise" or "ignore", not {on_repeated_key!r}')
        self.source = source
        self.key_rule = key_rule
        self.fields = fields
        self.lowercase = lowercase
        self.on_duplicate = on_duplicate
        self.on_repeated_key = on_repeated_key
        self.on_error = on_error
        self._empty_passes = EmptyPassGuard()
        self._progress = Progress()
        self._resume: Resume | None = None
        self._share: ShardShare | None = None
        self._listings: OpaqueValue[list[ShardOrder]] = OpaqueValue([])  # hidden: torch would treat them as sources
        self._listed: list[Seen] = []
        self._listed_at = -1  # the value of ShardOrder.changes at which _listed was read
        self._form: tuple[object, int, Form] = None, -1, None  # the run, its first column, and its form

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the sample that was yielded last."""
        return lambda: SamplePosition(*self._progress.last)

    def record_state(self, recorder: Recorder) -> Form:
        """Record the position of the next sample: the index of its shard in this instance, and the byte offset.

        ``"check"`` is a checksum of that sample's key; 0 if it is unknown. If the rest of the epoch was resharded,
        shards are counted across all instances, and ``"dealt"`` is the share of this one. If several shards are open,
        ``"open"`` lists the index, the offset and the checksum for each, in the order of their turns, and ``"next"`` is
        the next shard that was not opened. ``"listed"`` identifies the list of shards, if a loader has inserted a
        `ShardOrder`.
        """
        row, progress = recorder.row, self._progress
        token, column, form = self._form
        if (
            token is recorder.token
            and len(row) == column
            and self._listed_at == ShardOrder.changes
            and progress.floor < progress.next
            and self._resume is None
            and len(progress.open) == len(form.get("open", ()))
        ):
            row += progress.next  # nothing else has changed
            for position in progress.open:
                row += position
            return form
        column = len(row)
        (shard, offset, key), share = self._position()
        form = {"next": [recorder.number(shard), recorder.number(offset)], "check": recorder.checked(key)}
        positions = self._progress.open if self._resume is None else self._resume.open_positions()
        if self._open_shards > 1:
            number, checked = recorder.number, recorder.checked
            form["open"] = [[number(shard), number(offset), checked(key)] for shard, offset, key in positions]
        if seen := self._seen():
            form["listed"] = recorder.keep(self, seen, "listed")
        if share is not None:
            opened = {number: offset for number, offset, _ in positions}
            form["dealt"] = recorder.keep(self, share.state_dict((shard, offset), opened), "dealt")
        self._form = recorder.token, column, form
        return form

    def _position(self) -> tuple[tuple[int, int, int | str], ShardShare | None]:
        """Return the position of the next sample with its key or `key_checksum`, and the share of a resharded epoch."""
        if self._resume is not None:  # loaded, and not started
            return (*self._resume.next, self._resume.check), self._resume.share
        return self._progress.resume_position(), self._share

    @property
    def _open_shards(self) -> int:
        """The number of shards to keep open."""
        return self.source.open_shards if type(self.source) is ShardLoader else 1

    def _seen(self) -> list[Seen]:
        """Return the identifiers of the lists of shards; the same object until they change."""
        if self._listed_at != ShardOrder.changes and self._resume is None:
            self._listed_at = ShardOrder.changes
            seen = [listing.seen for listing in self._listings.value]
            if len(seen) != len(self._listed) or any(map(operator.is_not, seen, self._listed)):
                self._listed = seen
        return self._listed

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`; or ``{}`` if only the samples of ``again`` remain.
            again: the positions of earlier samples, which are yielded first.
        """
        shard, offset = state.get("next", END_OF_SHARDS)
        spans = defaultdict[int, list[tuple[int, int]]](list)
        for position in again:
            spans[position.shard].append((position.start, position.end))
        share = ShardShare.from_state(state["dealt"]) if "dealt" in state else None
        was_open = unpack_open_shards(state.get("open", ()))
        self._resume = Resume((shard, offset), spans, share, state.get("check", 0), was_open)
        self._listed_at = -1
        self._listed = [check_seen(seen) for seen in state.get("listed", ())]

    def reset_state(self) -> None:
        """Discard a loaded state, so that the next iteration starts from the beginning."""
        self._resume = None

    def __iter__(self) -> Iterator[Sample]:
        self._empty_passes.check(self, rotation_period(self.source))
        resume, self._resume = self._resume, None
        self.skipped_shards = 0 if resume is None else resume.next[0]
        self._share = None if resume is None else resume.share
        progress = self._progress = Progress() if resume is None else Progress(resume.next, resume.check)
        self._listed_at = -1
        self._listings.value = listings_before(self.source)
        if resume is not None:
            for listing, seen in zip(self._listings.value, self._listed, strict=False):
                listing.expect(seen)
        loader = self.source
        grouping = SampleGrouping(
            key_rule=self.key_rule,
            fields=self.fields,
            lowercase=self.lowercase,
            on_duplicate=self.on_duplicate,
            on_repeated_key=self.on_repeated_key,
            on_error=self.counted_errors,
        )
        if self._open_shards > 1:
            resume = resume or Resume()
            shards = loader.open(resume)
            yield from interleave_samples(shards, grouping, self._open_shards, progress=progress, resume=resume)
            return
        # torch's hook around each member would take a tenth of the time for small samples.
        shards = loader.read_shards(resume) if type(loader) is ShardLoader else split_by_shard(loader)
        if resume is not None and resume.check:
            shards = check_next_key(shards, resume.next, resume.check, self.key_rule)
        yield from grouping.group(shards, progress)
        grouping.finish()


@register_stage("shuffle_samples")
class SampleShuffler(SeededStage, RecordedStage[Sample]):
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

    rereads_samples = True
    can_reshard = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        buffer_size: int,
        *,
        initial: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(buffer_size, int):
            raise TypeError(f"buffer_size must be an integer, not {buffer_size!r}")
        initial = buffer_size if initial is None else initial
        if not 1 <= initial <= buffer_size:
            raise ValueError(f"shuffle_samples needs 1 <= initial <= buffer_size, not {initial} and {buffer_size}")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self.source = source
        self.buffer_size = buffer_size
        self.initial = initial
        self.max_bytes = max_bytes
        self._enabled = True
        self._rng = Random()
        self._state = ShuffleState(self.initial)
        self._loaded: ShuffleState | None = None
        self._form: tuple[object, int, Form] = None, -1, None  # the run, its first column, and its form

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the sample that was yielded last."""
        before = None if self._enabled else position_reader_of(self.source)
        return before or (lambda: self._state.at)

    def record_state(self, recorder: Recorder) -> Form:
        """Record the positions of the buffered samples, the number of draws, and the current size of the buffer.

        Raises:
            StateError: an earlier stage is declared stateless, but yields several items for one sample.
        """
        state = self._checked_state()
        row = recorder.row
        token, column, form = self._form
        if token is recorder.token and state.moves is not None and len(row) == column:
            row += (state.draws, state.room, len(state.moves.slots))
            return form
        column = len(row)
        form = {
            "draws": recorder.number(state.draws),
            "room": recorder.number(state.room),
            "waiting": recorder.waiting(self, state),
        }
        self._form = recorder.token, column, form
        return form

    def _checked_state(self) -> ShuffleState:
        state = self._loaded or self._state
        if state.is_ambiguous:
            raise StateError(
                "shuffle_samples records its buffered items by their positions, but an earlier stage that is declared "
                "stateless yields several items for one sample. Do not declare that stage stateless"
            )
        return state

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`; or ``{}`` if only the samples of ``again`` remain.
            again: the positions of samples that later stages have buffered; they are yielded first.
        """
        loaded = ShuffleState(state.get("room", self.initial))
        loaded.waiting = unpack_positions(state.get("waiting", ()))
        if len({position.identity for position in loaded.waiting}) < len(loaded.waiting):
            raise StateError("The state of shuffle_samples is corrupt: it lists a buffered sample twice")
        loaded.draws = state.get("draws", 0)
        loaded.again = set(again)
        self._loaded = loaded

    def reset_state(self) -> None:
        """Discard a loaded state, so that the next iteration starts from the beginning."""
        self._loaded = None

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

    def __iter__(self) -> Iterator[Sample]:
        if not self._enabled:
            yield from self.source
            return
        self._state, self._loaded = self._loaded or ShuffleState(self.initial), None
        yield from shuffle_samples(
            self.source,
            rng=self._rng,
            buffer_size=self.buffer_size,
            state=self._state,
            max_bytes=self.max_bytes,
            position=position_reader_of(self.source),
        )
