"""Assignment of the rest of an epoch to a different number of instances of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from wds_datapipes.pipes.samples.indexed import IndexedSamples
from wds_datapipes.pipes.state.pipeline_state import stateful
from wds_datapipes.pipes.state.shard_order import merge_seen
from wds_datapipes.shards.position import (
    Resume,
    SamplePosition,
    ShardShare,
    next_position,
    open_positions,
    unpack_positions,
)

__all__ = ["assign_shards", "reshard_states"]

Part = Sequence[Mapping[str, Any] | None]
"""The state of one instance of a pipeline."""


def reshard_states(
    pipe: Any, parts: Sequence[Part | None], held_later: Sequence[Sequence[SamplePosition]], instances: int
) -> list[list[dict[str, Any] | None]]:
    """Return the state from which each instance of a pipeline resumes after resharding.

    Args:
        pipe: the pipeline, or a source of it.
        parts: the states of all previous instances.
        held_later: for each, the samples that later stages hold back.
        instances: the current number of instances.
    """
    first, *others = stateful(pipe)
    branches = first.nested_sources()
    firsts: list[dict[str, Any]]
    if isinstance(first, IndexedSamples):
        waiting_positions = [*chain(*held_later), *chain(*map(_waiting_positions, parts))]
        firsts = first.reshard_states([_first(part) for part in parts], waiting_positions, instances)
    elif not branches:
        shares = assign_shards(parts, instances, held_later)
        seen = merge_seen([_first(part).get("listed", ()) for part in parts])
        listed = {"listed": seen} if seen else {}
        firsts = [{"next": [0, 0, ""], **listed, "dealt": share.state_dict()} for share in shares]
    else:
        waiting = [[*own, *_waiting_positions(part)] for own, part in zip(held_later, parts, strict=True)]
        resharded = []
        for number, source in enumerate(branches):
            mixed = [None if part is None else part[0] for part in parts]
            states = [None if each is None else each["sources"][number]["state"] for each in mixed]
            # The source and pass numbers come first; all instances have the same pass.
            own = [
                [each._replace(route=each.route[2:]) for each in some if each.route[0] == number] for some in waiting
            ]
            resharded.append(reshard_states(source, states, own, instances))
        firsts = [{"sources": [{"pass": 0, "state": state} for state in each]} for each in zip(*resharded, strict=True)]
    return [[each, *[None] * len(others)] for each in firsts]


def _first(part: Part | None) -> Mapping[str, Any]:
    """Return the state of the first stage of an instance, which reads the shards."""
    return next((stage for stage in part or () if stage is not None), {})


def _waiting_positions(part: Part | None) -> list[SamplePosition]:
    """Return the positions of the samples that the stages of an instance hold back."""
    return [at for stage in part or () for at in unpack_positions((stage or {}).get("waiting", ()))]


def assign_shards(
    parts: Sequence[Part | None], instances: int, held_later: Sequence[Sequence[SamplePosition]] | None = None
) -> list[ShardShare]:
    """Assign the samples that the previous instances have not yielded to a different number of instances.

    The rest of a partly read shard goes to one instance, along with the samples held back from it. So does each other
    shard before the last one that was started; the later shards, however many, are assigned round-robin.

    Args:
        parts: the states of all previous instances, after the delivered items; ``None`` is the beginning.
        instances: the current number of instances.
        held_later: for each previous instance, the samples held back by stages whose states are not in ``parts``.
    """
    remaining = [
        _remaining(stages, number, len(parts), held_later[number] if held_later else ())
        for number, stages in enumerate(parts)
    ]
    since = max(max(share.since, resume.next[0] + (resume.next[1] > 0)) for share, resume in remaining)
    # For each piece: whether it is known to contain many samples, and the bytes of single ones.
    pieces: dict[int, list[tuple[int, int]]] = {}
    sizes: dict[int, tuple[bool, int]] = {}
    for share, resume in remaining:
        for shard in {*resume.again, *share.shards(since)}:
            if spans := resume.spans(shard):
                pieces[shard] = spans
                is_open = resume.unread(shard) != [] and spans[-1][1] < 0
                sizes[shard] = is_open, sum(max(0, end - start) for start, end in spans)
    # Assign large pieces first, so that no instance has much more than another.
    order = sorted(pieces, key=lambda shard: (*sizes[shard], -shard), reverse=True)
    return [
        ShardShare(
            every=instances,
            turn=(instance - len(pieces) + since) % instances,
            since=since,
            pieces={shard: pieces[shard] for shard in sorted(order[instance::instances])},
        )
        for instance in range(instances)
    ]


def _remaining(
    stages: Part | None, number: int, instances: int, held_later: Sequence[SamplePosition]
) -> tuple[ShardShare, Resume]:
    """Return the share of an instance, and the rest of it that is unread."""
    first = _first(stages)
    shard, start, key = next_position(first.get("next", (0, 0, "")))
    again = defaultdict[int, list[tuple[int, int]]](list)
    if "dealt" in first:
        share, every, turn = ShardShare.from_state(first["dealt"]), 1, 0
    else:  # it counts the shards assigned to it at the start of the epoch
        share, every, turn = ShardShare(instances, number), instances, number
    for address in (*_waiting_positions(stages), *held_later):
        again[address.shard * every + turn].append((address.start, address.end))
    was_open = [(number * every + turn, at, key) for number, at, key in open_positions(first.get("open", ()))]
    return share, Resume((shard * every + turn, start, key), again, share, open=was_open)
