"""The base class of stages that read shards into samples and know their positions."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.graph import check_shard_list
from wds_datapipes.pipes.roles import Source
from wds_datapipes.pipes.sharding import rotation_period, unsplit
from wds_datapipes.pipes.shards.shard_reading import ShardReadingStage
from wds_datapipes.pipes.stage import OpaqueValue, SnapshotStage
from wds_datapipes.pipes.state.empty_passes import EmptyPassGuard
from wds_datapipes.pipes.state.shard_order import Seen, ShardOrder, listings_before, merge_seen
from wds_datapipes.samples.grouping import RecordGrouping, SampleGrouping
from wds_datapipes.samples.mixing import interleave_samples
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, deliver_held, read_again
from wds_datapipes.shards.loading import ShardMembers
from wds_datapipes.shards.position import (
    ALL_SHARDS,
    END_OF_SHARDS,
    Progress,
    Resharding,
    Resume,
    SamplePosition,
    ShardShare,
    assign_shards,
    pack_positions,
    unpack_positions,
    within,
)
from wds_datapipes.types import Sample


class PositionedSamples(Source, SnapshotStage[Sample]):
    """Base class of stages that yield the samples of shards, one for each group of members or each record."""

    has_position = True
    can_reshard = True

    _loaded: Resume | None

    def __init__(self) -> None:
        super().__init__()
        self._empty_passes = EmptyPassGuard()
        self._progress = Progress()
        self._awaited, self._held = NONE_AWAITED, OpaqueValue[Any](())
        self._share: ShardShare | None = None
        self._listings: OpaqueValue[list[ShardOrder]] = OpaqueValue([])  # hidden: torch would treat them as sources
        self._listed: list[Seen] = []
        self._listed_at = -1  # the value of ShardOrder.changes when _listed was read

    @property
    def shard_reader(self) -> ShardReadingStage[Any] | None:
        """The stage that reads the shards, if it is this stage or the one before; otherwise None."""
        raise NotImplementedError

    def _make_grouping(self) -> SampleGrouping | RecordGrouping:
        """Return the object that turns the items of shards into samples."""
        raise NotImplementedError

    def _read_shards(self, resume: Resume) -> Iterator[ShardMembers]:
        """Yield the part of the shards that is still to be read, with their items."""
        raise NotImplementedError

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the last sample yielded."""
        return lambda: SamplePosition(*self._progress.last)

    def snapshot(self) -> dict[str, Any]:
        """Return the position of the next sample: the index of its shard in this instance, its offset, and its key.

        The key is "" if unknown. If the rest of the epoch was resharded, shards are counted across all instances, and
        ``"share"`` is the share of this instance. If several shards are open, ``"open"`` lists the next position in
        each, in the order of their turns, and ``"next"`` is the next unopened shard. ``"shard_list"`` identifies the
        list of shards if a loader has inserted a `ShardOrder`.
        """
        resume, progress = self._loaded, self._progress
        if resume is None:
            following, share = progress.resume_position(), self._share
        else:  # loaded, but not started
            following, share = resume.next, resume.share
        state: dict[str, Any] = {"next": following}
        if positions := progress.open if resume is None else resume.open:
            state["open"] = tuple(positions)
        if seen := self._seen():
            state["shard_list"] = seen
        if share is not None:
            state["share"] = share.state_dict()
        if self._held.value:
            state["held"] = self._held.value
        return state

    def _seen(self) -> list[Seen]:
        """Return the identifiers of the lists of shards; the same object until they change."""
        if self._listed_at != ShardOrder.changes[0] and self._loaded is None:
            self._listed_at = ShardOrder.changes[0]
            seen = [listing.seen for listing in self._listings.value]
            if len(seen) != len(self._listed) or any(map(operator.is_not, seen, self._listed)):
                self._listed = seen
        return self._listed

    def check_position(self) -> None:
        """Check that this stage knows the position of each item in the shards.

        Raises:
            StateError: this is not the case, or the list of shards cannot be reproduced from its seeds.
        """
        reader = self.shard_reader
        if reader is None:
            raise StateError(
                "group_samples can determine its position only directly after load_wds_shards, but it comes after "
                f"{type(self.source).__name__}"
            )
        check_shard_list(reader.source)

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state, from which the next iteration resumes."""
        spans = defaultdict[int, list[tuple[int, int]]](list)
        for position in again:
            spans[position.shard].append((position.start, position.end))
        share = ShardShare.from_state(state["share"]) if "share" in state else None
        following = tuple(state.get("next", END_OF_SHARDS))
        key_rule = self._make_grouping().key_rule
        self._loaded = Resume(following, spans, share, [*map(tuple, state.get("open", ()))], key_rule)
        self._awaited, self._held = again, OpaqueValue(state.get("held", ()))
        self._listed_at = -1
        self._listed = [*state.get("shard_list", ())]

    def check_resharding(self) -> None:
        """Check that the list of shards can be read before it is split.

        Raises:
            StateError: it cannot be read.
        """
        super().check_resharding()
        if (reader := self.shard_reader) is not None:
            unsplit(reader.source)

    def reshard_states(self, rest: Resharding) -> list[dict[str, Any]]:
        """Return the states from which a different number of instances resumes: each gets its share of the shards."""
        seen = merge_seen([(state or {}).get("shard_list", ()) for state in rest.states])
        listed = {"shard_list": seen} if seen else {}
        return [
            {
                "next": [0, 0, ""],
                **listed,
                "share": share.state_dict(),
                **({"held": pack_positions(held)} if held else {}),
            }
            for share, held in assign_shards(rest)
        ]

    def __iter__(self) -> Iterator[Sample]:
        self._empty_passes.check(self, rotation_period(self.source))
        loaded, self._loaded = self._loaded, None
        resume = loaded or ALL_SHARDS
        self.skipped_shards = resume.next[0]
        self._share = resume.share
        progress = self._progress = Progress(resume.next)
        self._listed_at = -1
        self._listings.value = listings_before(self.source)
        if loaded is not None:
            for listing, seen in zip(self._listings.value, self._listed, strict=False):
                listing.expect(seen)
        awaited, self._awaited = NONE_AWAITED if loaded is None else self._awaited, NONE_AWAITED
        self._held = OpaqueValue(()) if loaded is None else self._held
        held = awaited.of_others(within(unpack_positions(self._held.value), resume.unread))
        grouping = self._make_grouping()
        reader = self.shard_reader
        takes_turns = reader is not None and reader.open_shards > 1
        if reader is not None and takes_turns:
            samples = interleave_samples(reader.open_reader(resume), grouping, progress=progress, resume=resume)
        else:
            samples = grouping.group(self._read_shards(resume), progress)
        if awaited:
            skipped = self._count_skipped()
            yield from read_again(
                samples, awaited, self.position_reader(), may_lack=lambda: self._count_skipped() > skipped
            )
        if held:
            yield from deliver_held(samples, held, self.position_reader())
        yield from samples
        if not takes_turns:
            grouping.finish()

    def _count_skipped(self) -> int:
        """Return the number of items that the error policies of this stage and the reader have skipped."""
        counters = {id(each): each for each in (self.counters, (self.shard_reader or self).counters)}
        return sum(each.entries for each in counters.values())
