"""Assignment of the rest of an epoch to a different number of instances of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from wds_datapipes.shards.position import Resume, SamplePosition, ShardShare, next_position, open_positions


def assign_shards(
    states: Sequence[Mapping[str, Any] | None], waiting: Sequence[Sequence[SamplePosition]], instances: int
) -> list[ShardShare]:
    """Assign the samples that the previous instances have not yielded to a different number of instances.

    The rest of a partly read shard goes to one instance, along with the samples held back from it. So does each other
    shard before the last one that was started; the later shards, however many, are assigned round-robin.

    Args:
        states: for each previous instance, the position in its shards after the delivered items, as in the state of
            ``.group_samples()``; ``None`` is the beginning.
        waiting: for each previous instance, the samples that its stages hold back.
        instances: the current number of instances.
    """
    remaining = [
        _remaining(state or {}, number, len(states), held)
        for number, (state, held) in enumerate(zip(states, waiting, strict=True))
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
    state: Mapping[str, Any], number: int, instances: int, waiting: Sequence[SamplePosition]
) -> tuple[ShardShare, Resume]:
    """Return the share of an instance, and the rest of it that is unread."""
    shard, start, key = next_position(state.get("next", (0, 0, "")))
    again = defaultdict[int, list[tuple[int, int]]](list)
    if "dealt" in state:
        share, every, turn = ShardShare.from_state(state["dealt"]), 1, 0
    else:  # it counts the shards assigned to it at the start of the epoch
        share, every, turn = ShardShare(instances, number), instances, number
    for address in waiting:
        again[address.shard * every + turn].append((address.start, address.end))
    was_open = [(number * every + turn, at, key) for number, at, key in open_positions(state.get("open", ()))]
    return share, Resume((shard * every + turn, start, key), again, share, open=was_open)
