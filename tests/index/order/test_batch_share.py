"""The shares of workers in global batches, and the rest of an interrupted epoch."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.index.order.batch_share import WHOLE_EPOCH, BatchShare, Remainder, RestOfEpoch, rest_of_epoch
from wds_datapipes.types import Instance


def shares(
    count: int, batch: int, remainder: Remainder, ranks: int, workers: int, rest: RestOfEpoch, lanes: int = 1
) -> list[BatchShare]:
    return [
        BatchShare(count, batch, remainder, Instance(number % ranks, ranks, number // ranks, workers), rest, lanes)
        for number in range(ranks * workers)
    ]


def positions(share: BatchShare, done: int = 0) -> list[int]:
    return list(chain.from_iterable(each.tolist() for each in share.positions(done)))


@settings(max_examples=60)
@given(st.data())
def test_an_epoch_resharded_repeatedly_has_each_kept_position_once(data: st.DataObject) -> None:
    remainder: Remainder = data.draw(st.sampled_from(["drop", "pad", "keep"]), "remainder")
    batch = data.draw(st.none() | st.integers(1, 5).map(lambda multiple: 12 * multiple), "batch")
    lanes = data.draw(st.sampled_from([1, 2, 3, 6, 12]) if batch else st.just(1), "lanes")
    count = data.draw(st.integers(0 if remainder == "keep" else batch or 4, 700), "count")
    found: list[int] = []
    rest, first_batch = WHOLE_EPOCH, 0
    for _ in range(4):
        ranks, workers = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)), "ranks and workers")
        some = shares(count, batch or ranks, remainder, ranks, workers, rest, lanes)
        first_batch = first_batch or batch or ranks
        assert [len(positions(share)) for share in some] == [len(share) for share in some]
        of_ranks = [sum(map(len, some[rank::ranks])) for rank in range(ranks)]
        assert max(of_ranks) - min(of_ranks) <= (remainder != "pad")
        done = [data.draw(st.integers(0, len(share)), "done") for share in some]
        delivered = [positions(share)[:number] for share, number in zip(some, done, strict=True)]
        assert [positions(share, number) for share, number in zip(some, done, strict=True)] == [
            positions(share)[number:] for share, number in zip(some, done, strict=True)
        ]
        everything = list(chain.from_iterable(delivered))
        waiting = everything[: data.draw(st.integers(0, len(everything)), "waiting")]
        found += everything[len(waiting) :]
        first_batch = first_batch if any(done) or rest != WHOLE_EPOCH else 0  # it has not begun
        rest = RestOfEpoch.from_state(rest_of_epoch(list(zip(some, done, strict=True)), waiting).state_dict())
    last = shares(count, batch or 4, remainder, 4, 2, rest, lanes)
    found += chain.from_iterable(positions(share) for share in last)
    kept = count // (first_batch or batch or 4) * (first_batch or batch or 4) if remainder == "drop" else count
    assert sorted(position for position in found if position < count) == list(range(kept))
    assert len({*found}) == len(found), "no padding comes twice"
    assert remainder == "pad" or max(found, default=0) < max(count, 1)


@settings(max_examples=60)
@given(st.data())
def test_whole_batches_remain_after_steps_of_all_ranks(data: st.DataObject) -> None:
    """This keeps ranks in step even if samples of later batches came first, as from a shuffle buffer."""
    remainder: Remainder = data.draw(st.sampled_from(["drop", "pad"]), "remainder")
    batch = 12 * data.draw(st.integers(1, 3), "multiple")
    lanes = data.draw(st.sampled_from([1, 2, 4, 12]), "lanes")
    count = data.draw(st.integers(batch, 400), "count")
    rest, found = WHOLE_EPOCH, list[int]()
    for ranks, workers in data.draw(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3)), max_size=4)):
        some = shares(count, batch, remainder, ranks, workers, rest, lanes)
        done, came = [], list[int]()
        steps = [data.draw(st.integers(0, 3), "steps of a worker") for _ in range(workers)]
        for share in some:
            read = positions(share)
            taken = min(steps[share.instance.worker] * share.size, len(read))
            ahead = min(taken + data.draw(st.integers(0, 20), "samples in a buffer"), len(read))
            done.append(ahead)
            came += data.draw(st.permutations(read[:ahead]), "order")[:taken]
        begun = [position for share, number in zip(some, done, strict=True) for position in positions(share)[:number]]
        found += came
        rest = rest_of_epoch(list(zip(some, done, strict=True)), {*begun} - {*came})
        left = shares(count, batch, remainder, ranks, workers, rest, lanes)
        assert len({len(share) % share.size for share in left}) == 1
        assert sum(map(len, left)) % batch == 0
    found += positions(shares(count, batch, remainder, 1, 1, rest, lanes)[0])
    assert sorted(found) == list(range(count // batch * batch if remainder == "drop" else -(-count // batch) * batch))


@pytest.mark.parametrize(
    "state",
    [
        {"start": -1, "missing": []},
        {"start": 0, "missing": ["1"]},
        {"start": True, "missing": []},
        {"start": 0, "missing": [], "end": "9"},
    ],
)
def test_a_damaged_rest_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the rest of the epoch has the positions"):
        RestOfEpoch.from_state(state)
