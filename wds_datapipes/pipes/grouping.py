"""From members to samples, and samples in another order."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.loading import ShardLoader
from wds_datapipes.pipes.sharding import turns_of
from wds_datapipes.pipes.stage import OpaqueValue, Stage, register_stage
from wds_datapipes.pipes.state.empty_passes import EmptyPassGuard
from wds_datapipes.pipes.state.graph import position_reader_of
from wds_datapipes.pipes.state.recording import CHECK, WAITING, Form
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.pipes.state.shard_order import Seen, ShardOrder, checked_seen, listings_before
from wds_datapipes.samples.derived_position import pack_positions, unpack_positions
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey, check_next_key, group_samples, split_by_shard
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.samples.shuffling import ShuffleState, shuffle_samples
from wds_datapipes.shards.position import NOTHING_LEFT, Progress, Resume, SamplePosition, ShardShare, check_of
from wds_datapipes.types import Member, Sample

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Recorder

__all__ = ["SampleGrouper", "SampleShuffler"]


@register_stage("group_samples")
class SampleGrouper(Stage[Sample]):
    """Gather neighbouring files with one key into a sample (functional name: ``group_samples``).

    A file's name is split at the first dot of its base name: ``train/0001.seg.png`` is the field ``seg.png`` of the
    sample ``train/0001``. Hidden files, files without a dot and files below a name like ``__meta__`` belong to no
    sample. The end of a shard always ends a sample; a sample that may lack a field, since its shard broke off, is
    never yielded.

    Yields:
        dict[str, bytes]: ``__key__``, ``__url__`` (both ``str``), ``__local_path__`` (``str``, where the shard is a
        local file) and the fields in the order of the archive, without a leading dot.

    Args:
        source: yields `Member`.
        key_rule: splits a name into ``(key, field)``, or returns ``None`` for a file of no sample: `first_dot`,
            `last_dot` or a function of your own.
        fields: the fields to keep; samples without any of them are not yielded. All fields are kept by default.
        lowercase: call fields by their lower-case names.
        on_duplicate: what to do when a field occurs twice in a sample: ``"raise"``, or keep the ``"first"`` or
            ``"last"``.
        on_repeated_key: what to do when files of a sample come after those of another sample of the same shard:
            ``"warn"`` once (they make up a sample of their own), ``"raise"`` or ``"ignore"``. The first 65,536 keys
            of a shard are remembered for this.
        on_error: ``"raise"``; or, to pass over the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        EmptySourceError: a stage begins this one again and again, and no item leaves the pipeline.
        DuplicateFieldError: a field occurs twice in a sample.
        RepeatedKeyError: a sample's files are not neighbours, and ``on_repeated_key`` is ``"raise"``.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": "a", "txt": b"one", "cls": b"1"}])
        >>> list(ShardList(shard).load_wds_shards().group_samples(fields=["cls"]))
        [{'__key__': 'a', '__url__': 'train.tar', '__local_path__': 'train.tar', 'cls': b'1'}]
    """

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
            raise TypeError(f"key_rule is first_dot, last_dot or another function of a name, not {key_rule!r}")
        if isinstance(fields, str):
            raise TypeError(f'fields is a collection of names, as in ["jpg", "cls"], not the string {fields!r}')
        if on_duplicate not in ("raise", "first", "last"):
            raise ValueError(f'on_duplicate is "raise", "first" or "last", not {on_duplicate!r}')
        if on_repeated_key not in ("warn", "raise", "ignore"):
            raise ValueError(f'on_repeated_key is "warn", "raise" or "ignore", not {on_repeated_key!r}')
        self.source = source
        self.key_rule = key_rule
        self.fields = fields
        self.lowercase = lowercase
        self.on_duplicate = on_duplicate
        self.on_repeated_key = on_repeated_key
        self.on_error = on_error
        self._deliveries = EmptyPassGuard()
        self._progress = Progress()
        self._resume: Resume | None = None
        self._deal: ShardShare | None = None
        self._listings: OpaqueValue[list[ShardOrder]] = OpaqueValue([])  # torch would take them for sources
        self._listed: list[Seen] = []
        self._listed_at = -1  # how often a listing had changed then
        self._form: tuple[int, Form] = -1, None  # of the run that is recorded, in which column it begins

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the sample that was yielded last."""
        return lambda: SamplePosition(*self._progress.last)

    def state_dict(self) -> dict[str, Any]:
        """Return where the next sample begins: the number of its shard among those of this instance, and the byte.

        The key of that sample is known by a checksum; 0 if there is none before the end of the shard.
        Where the rest of the epoch was dealt anew, shards have their numbers among all, and what was dealt is told.
        What was seen of the list of shards is told, if a loader has inserted a `ShardOrder`.
        """
        (shard, offset, key), deal = self._place()
        listed = {"listed": self._seen()} if self._seen() else {}
        dealt = {} if deal is None else {"dealt": deal.state_dict((shard, offset))}
        check = check_of(key) if isinstance(key, str) else key
        return {"next": [shard, offset], "check": check, **listed, **dealt}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns; what stays the same for many samples is kept."""
        row, progress = recorder.row, self._progress
        column, form = self._form
        if (
            len(row) == column
            and not recorder.is_first
            and self._listed_at == ShardOrder.changes
            and progress.floor < progress.next
            and self._resume is None
        ):
            row += progress.next
            return form
        column = len(row)
        place, deal = self._place()
        row += place
        form = {"next": [(column,), (column + 1,)], "check": (column + 2, CHECK)}
        if seen := self._seen():
            form["listed"] = recorder.keep(self._listings, seen, lambda: seen)
        if deal is not None:
            form["dealt"] = recorder.keep(self, deal, partial(deal.state_dict, place[:2]))
        self._form = column, form
        return form

    def _place(self) -> tuple[tuple[int, int, int | str], ShardShare | None]:
        """Return where the next sample begins, its key or `check_of` it, and what was dealt."""
        if self._resume is not None:  # loaded, and not begun
            return (*self._resume.next, self._resume.check), self._resume.deal
        return self._progress.place(), self._deal

    def _seen(self) -> list[Seen]:
        """Return what was seen of the list of shards; the same object as long as that does not change."""
        if self._listed_at != ShardOrder.changes and self._resume is None:
            self._listed_at = ShardOrder.changes
            seen = [listing.seen for listing in self._listings.value]
            if len(seen) != len(self._listed) or any(map(operator.is_not, seen, self._listed)):
                self._listed = seen
        return self._listed

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only samples that come again are left.
            again: samples before that place, which are yielded first.
        """
        shard, offset = state.get("next", NOTHING_LEFT)
        places = defaultdict[int, list[tuple[int, int]]](list)
        for address in again:
            places[address.shard].append((address.start, address.end))
        deal = ShardShare.from_state(state["dealt"]) if "dealt" in state else None
        self._resume = Resume((shard, offset), places, deal, state.get("check", 0))
        self._listed_at = -1
        self._listed = [checked_seen(seen) for seen in state.get("listed", ())]

    def reset_state(self) -> None:
        """Begin anew when it is iterated next."""
        self._resume = None

    def __iter__(self) -> Iterator[Sample]:
        self._deliveries.check(self, turns_of(self.source))
        resume, self._resume = self._resume, None
        self.skipped_shards = 0 if resume is None else resume.next[0]
        self._deal = None if resume is None else resume.deal
        progress = self._progress = Progress() if resume is None else Progress(resume.next, resume.check)
        self._listed_at = -1
        self._listings.value = listings_before(self.source)
        if resume is not None:
            for listing, seen in zip(self._listings.value, self._listed, strict=False):
                listing.expect(seen)
        # torch's hook around each member, of which a sample has several, would cost a tenth of the time of a small one.
        loader = self.source
        shards = loader.read_shards(resume) if type(loader) is ShardLoader else split_by_shard(loader)
        if resume is not None and resume.check:
            shards = check_next_key(shards, resume.next, resume.check, self.key_rule)
        yield from group_samples(
            shards,
            key_rule=self.key_rule,
            fields=self.fields,
            lowercase=self.lowercase,
            on_duplicate=self.on_duplicate,
            on_repeated_key=self.on_repeated_key,
            on_error=self.on_error,
            progress=progress,
        )


@register_stage("shuffle_samples")
class SampleShuffler(SeededStage, Stage[Sample]):
    """Shuffle samples through a buffer of bounded size (functional name: ``shuffle_samples``).

    Each sample comes exactly once. Put it before decoding: what waits in the buffer is then small. The seed comes from
    the loader, as for torch's ``.shuffle()``: another one for each epoch and worker. ``DataLoader(shuffle=False)``
    turns it off.

    Yields:
        Any: the items of ``source``, unchanged, in random order.

    Args:
        source: yields samples, or anything else.
        buffer_size: how many samples wait in the buffer when one is drawn; 1 keeps the order.
        initial: how many samples are gathered before the first is drawn; from then on two come in for each that leaves,
            until ``buffer_size`` wait. By default ``buffer_size``; fewer start sooner, and mix the first ones less.
        max_bytes: the most bytes of values (of bytes, arrays, tensors and images) that wait in the buffer.

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
            raise TypeError(f"buffer_size is a number of samples, not {buffer_size!r}")
        initial = buffer_size if initial is None else initial
        if not 1 <= initial <= buffer_size:
            raise ValueError(f"shuffle_samples needs 1 <= initial <= buffer_size, not {initial} and {buffer_size}")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is a number of bytes, not {max_bytes}")
        self.source = source
        self.buffer_size = buffer_size
        self.initial = initial
        self.max_bytes = max_bytes
        self._enabled = True
        self._rng = Random()
        self._state = ShuffleState(self.initial)
        self._loaded: ShuffleState | None = None
        self._form: tuple[int, Form] = -1, None  # of the run that is recorded, in which column it begins

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the sample that was yielded last."""
        before = None if self._enabled else position_reader_of(self.source)
        return before or (lambda: self._state.at)

    def state_dict(self) -> dict[str, Any]:
        """Return where the samples are that wait in the buffer, how many were drawn, and how many may wait.

        Raises:
            StateError: a stage before makes several items of one, and does not tell which of them one is.
        """
        state = self._clear_state()
        return {"waiting": pack_positions(state.waiting), "draws": state.draws, "room": state.room}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns; where the samples are that wait is followed."""
        state = self._clear_state()
        row = recorder.row
        column, form = self._form
        if state.moves is None or recorder.is_first or column != len(row):
            column = len(row)
            number = recorder.follow(self, state)
            form = {"waiting": (column + 2, WAITING, number), "draws": (column,), "room": (column + 1,)}
            self._form = column, form
        row += (state.draws, state.room, 0 if state.moves is None else len(state.moves.slots))
        return form

    def _clear_state(self) -> ShuffleState:
        state = self._loaded or self._state
        if state.is_unclear:
            raise StateError(
                "shuffle_samples knows the items that wait in it by where they come from, and a stage before it makes "
                "several items of one sample. Let that be .unbatch_samples(), or .compose() with each_alone=True"
            )
        return state

    def load_state_dict(self, state: Mapping[str, Any], passing: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only samples are left that wait in a later stage.
            passing: samples that wait in a later stage, and are to be handed on first.
        """
        loaded = ShuffleState(state.get("room", self.initial))
        loaded.waiting = unpack_positions(state.get("waiting", ()))
        if len({address.place for address in loaded.waiting}) < len(loaded.waiting):
            raise StateError("The state of shuffle_samples is not whole: a sample waits in it twice")
        loaded.draws = state.get("draws", 0)
        loaded.passing = set(passing)
        self._loaded = loaded

    def reset_state(self) -> None:
        """Begin anew when it is iterated next."""
        self._loaded = None

    def set_shuffle(self, shuffle: bool = True) -> SampleShuffler:
        """Turn shuffling on or off; loaders call this."""
        self._enabled = shuffle
        return self

    def reset(self) -> None:
        """Begin an epoch, with the seed that was set for it or one from torch's generator."""
        self._rng.seed(self.take_seed())

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
            address=position_reader_of(self.source),
        )
