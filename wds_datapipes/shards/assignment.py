"""Assign the rest of an epoch to a different number of instances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_datapipes.shards.position import Resume, SamplePosition, ShardShare


@dataclass(frozen=True)
class Resharding:
    """The rest of an epoch that several instances of a stage have begun, for a different number of instances.

    Attributes:
        states: the states of all previous instances, in the order of `instance_of`; None means the beginning.
        waiting: called with the number of a previous instance, returns the positions of the samples that its later
            stages hold back.
        instances: the current number of instances.
        own: the current instances whose states are requested. Only the positions that they take over are unpacked.
    """

    states: Sequence[Any]
    waiting: Callable[[int], Iterable[SamplePosition]]
    instances: int
    own: Sequence[int]


def assign_shards(rest: Resharding) -> list[ShardShare]:
    """Assign the samples that the previous instances have not yielded to the current instances.

    Each instance takes over some previous instances, or part of one. The rest of a partly read shard goes to a single
    instance, along with the samples held back from that shard. So does every other shard before the last one that was
    started. All later shards are assigned round-robin.

    Args:
        rest: the resharding, with the states of ``.group_samples()``: the positions in the shards after the delivered
            items.
    """
    states, every = [state or {} for state in rest.states], rest.instances
    count = len(states)
    heads = [_head(state, number, count) for number, state in enumerate(states)]
    since = max(reached for reached, _ in heads)
    order = sorted(range(count), key=lambda number: not heads[number][1])  # so that all get equally many begun ones
    shares = []
    for instance in rest.own:
        first, turn = instance % count, instance // count
        pieces = dict[int, Sequence[tuple[int, int]]]()
        for number in order[first::every]:
            found = _pieces(states[number], number, count, rest.waiting(number), since)
            pieces.update(found[turn :: len(range(first, every, count))])
        assigned = {shard: pieces[shard] for shard in sorted(pieces)}
        shares.append(ShardShare(every, (instance - count + since) % every, since, assigned))
    return shares


def _head(state: Mapping[str, Any], number: int, instances: int) -> tuple[int, bool]:
    """Return the first shard that an instance has not begun, and whether part of an earlier one is unread."""
    shard, start, _ = state.get("next", (0, 0, ""))
    is_begun, since = start > 0 or "open" in state, 0
    if "dealt" in state:
        since = state["dealt"]["since"]
        is_begun |= shard < since
    else:
        shard = shard * instances + number
    return max(since, shard + (start > 0)), is_begun


def _pieces(
    state: Mapping[str, Any], number: int, instances: int, waiting: Iterable[SamplePosition], since: int
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return the shards that an instance has begun, and those before ``since``, each with its unread spans.

    Shards with an open end come first, because they may have many samples; the others are sorted by size.
    """
    shard, start, key = state.get("next", (0, 0, ""))
    again = defaultdict[int, list[tuple[int, int]]](list)
    if "dealt" in state:
        share, every, turn = ShardShare.from_state(state["dealt"]), 1, 0
    else:  # the instance counts the shards assigned to it at the start of the epoch
        share, every, turn = ShardShare(instances, number), instances, number
    for address in waiting:
        again[address.shard * every + turn].append((address.start, address.end))
    was_open = [(number * every + turn, at, key) for number, at, key in state.get("open", ())]
    resume = Resume((shard * every + turn, start, key), again, share, open=was_open)
    found = []
    for shard in {*again, *share.shards(since)}:
        if spans := resume.spans(shard):
            is_open = resume.unread(shard) != [] and spans[-1][1] < 0
            found.append((not is_open, -sum(max(0, end - start) for start, end in spans), shard, spans))
    return [(shard, spans) for _, _, shard, spans in sorted(found)]
