"""What is left of an epoch, dealt to other instances of a pipeline than those that have begun it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from wds_datapipes.pipes.state.pipeline_state import stateful
from wds_datapipes.pipes.state.shard_order import merged_seen
from wds_datapipes.shards.position import Resume, SamplePosition, ShardShare

__all__ = ["deal_anew", "dealt_states"]

Part = Sequence[Mapping[str, Any] | None]
"""The state of one instance of a pipeline."""


def dealt_states(
    pipe: Any, parts: Sequence[Part | None], behind: Sequence[Sequence[SamplePosition]], instances: int
) -> list[list[dict[str, Any] | None]]:
    """Return where each instance of a pipeline goes on when what is left is dealt anew.

    Args:
        pipe: the pipeline, or a source of it.
        parts: its states in all instances that there were.
        behind: the samples of each that wait in stages behind it.
        instances: how many there are now.
    """
    first, *others = stateful(pipe)
    branches = first.nested_sources()
    firsts: list[dict[str, Any]]
    if not branches:
        deals = deal_anew(parts, instances, behind)
        seen = merged_seen([_first(part).get("listed", ()) for part in parts])
        listed = {"listed": seen} if seen else {}
        firsts = [{"next": [0, 0], **listed, "dealt": deal.state_dict()} for deal in deals]
    else:
        waiting = [[*own, *_waiting_positions(part)] for own, part in zip(behind, parts, strict=True)]
        dealt = []
        for number, source in enumerate(branches):
            mixed = [None if part is None else part[0] for part in parts]
            states = [None if each is None else each["sources"][number]["state"] for each in mixed]
            # In front are the numbers of the source and of the pass, of which there is one.
            own = [[each._replace(way=each.way[2:]) for each in some if each.way[0] == number] for some in waiting]
            dealt.append(dealt_states(source, states, own, instances))
        firsts = [{"sources": [{"pass": 0, "state": state} for state in each]} for each in zip(*dealt, strict=True)]
    return [[each, *[None] * len(others)] for each in firsts]


def _first(part: Part | None) -> Mapping[str, Any]:
    """Return the state of the first stage of an instance, which reads the shards."""
    return next((stage for stage in part or () if stage is not None), {})


def _waiting_positions(part: Part | None) -> list[SamplePosition]:
    """Return where the samples are that wait in the stages of an instance."""
    return [SamplePosition.from_values(values) for stage in part or () for values in (stage or {}).get("waiting", ())]


def deal_anew(
    parts: Sequence[Part | None], instances: int, behind: Sequence[Sequence[SamplePosition]] | None = None
) -> list[ShardShare]:
    """Deal what the instances of a pipeline have not yielded to others.

    What is left of a shard that was begun goes to one of them, with the samples of it that wait. So does each of the
    other shards before the last one that was begun; those behind it are dealt in turn, however many there are.

    Args:
        parts: the states of all instances that there were, behind what was delivered; None is the beginning.
        instances: how many there are now.
        behind: the samples of each instance that wait in stages whose states are not among these.
    """
    left = [
        _remaining(stages, number, len(parts), behind[number] if behind else ()) for number, stages in enumerate(parts)
    ]
    since = max(max(deal.since, resume.next[0] + (resume.next[1] > 0)) for deal, resume in left)
    # An instance's pieces come with whether it is known to be many samples, and with the bytes of single ones.
    pieces: dict[int, list[tuple[int, int]]] = {}
    sizes: dict[int, tuple[bool, int]] = {}
    for deal, resume in left:
        for shard in {*resume.again, *deal.shards(since)}:
            if spans := resume.spans(shard):
                pieces[shard] = spans
                is_open = shard >= resume.next[0] and spans[-1][1] < 0
                sizes[shard] = is_open, sum(max(0, end - start) for start, end in spans)
    # Large ones come first, so that no instance has many more than another.
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
    stages: Part | None, number: int, instances: int, behind: Sequence[SamplePosition]
) -> tuple[ShardShare, Resume]:
    """Return what an instance had to read, and what is left of that."""
    first = _first(stages)
    shard, start = first.get("next", (0, 0))
    again = defaultdict[int, list[tuple[int, int]]](list)
    if "dealt" in first:
        deal, every, turn = ShardShare.from_state(first["dealt"]), 1, 0
    else:  # it counts the shards that were dealt to it when the epoch began
        deal, every, turn = ShardShare(instances, number), instances, number
    for address in (*_waiting_positions(stages), *behind):
        again[address.shard * every + turn].append((address.start, address.end))
    return deal, Resume((shard * every + turn, start), again, deal)
