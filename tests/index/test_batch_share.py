"""The shares of workers in global batches, and the rest of an interrupted epoch."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.index.order.batch_share import BatchShare, Remainder, RestOfEpoch, rest_of_epoch


def shares(
    count: int, batch: int, remainder: Remainder, ranks: int, workers: int, rest: RestOfEpoch
) -> list[BatchShare]:
    return [
        BatchShare(count, batch, remainder, ranks, number % ranks, workers, number // ranks, rest)
        for number in range(ranks * workers)
    ]


def positions(share: BatchShare, done: int = 0) -> list[int]:
    return list(chain.from_iterable(each.tolist() for each in share.positions(done)))


@given(st.data())
def test_an_epoch_resharded_repeatedly_has_each_position_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 700), "count")
    multiple = data.draw(st.integers(1, 12), "multiple")
    found: list[int] = []
    rest = RestOfEpoch()
    for _ in range(3):
        ranks, workers = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)), "ranks and workers")
        some = shares(count, multiple * ranks, "keep", ranks, workers, rest)
        assert [len(positions(share)) for share in some] == [len(share) for share in some]
        done = [data.draw(st.integers(0, len(share)), "done") for share in some]
        delivered = [positions(share)[:number] for share, number in zip(some, done, strict=True)]
        assert [positions(share, number) for share, number in zip(some, done, strict=True)] == [
            positions(share)[number:] for share, number in zip(some, done, strict=True)
        ]
        everything = list(chain.from_iterable(delivered))
        waiting = everything[: data.draw(st.integers(0, len(everything)), "waiting")]
        found += everything[len(waiting) :]
        rest = RestOfEpoch.from_state(rest_of_epoch(list(zip(some, done, strict=True)), waiting).state_dict())
    found += chain.from_iterable(positions(share) for share in shares(count, 4, "keep", 2, 2, rest))
    assert sorted(found) == list(range(count))


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_the_rest_after_whole_batches_is_a_few_numbers(
    count: int, multiple: int, ranks: int, workers: int, steps: int
) -> None:
    batch = multiple * ranks
    some = shares(count, batch, "pad", ranks, workers, RestOfEpoch())
    steps = min(steps, -(-count // batch))
    done = [multiple * len(range(number // ranks, steps, workers)) for number in range(ranks * workers)]
    rest = rest_of_epoch(list(zip(some, done, strict=True)))
    assert rest == RestOfEpoch(min(steps * batch, count))


@pytest.mark.parametrize(
    "state", [{"start": -1, "missing": []}, {"start": 0, "missing": ["1"]}, {"start": True, "missing": []}]
)
def test_a_damaged_rest_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the rest of the epoch has the positions"):
        RestOfEpoch.from_state(state)
