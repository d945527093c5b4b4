"""Mock samples: their number, and that no sample is affected by changes to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import MockSamples, ShardReadingService


def spoil(sample: dict[str, Any]) -> dict[str, Any]:
    sample["array"] += 1
    sample["nested"]["list"].append(1)
    sample["tensor"].zero_()
    return sample


def numbered(number: int) -> int:
    return number * 10


def test_changes_in_place_affect_no_other_sample_or_epoch() -> None:
    given = {"array": np.zeros(3), "nested": {"list": [0]}, "tensor": torch.ones(2)}
    source = MockSamples(given, 3)
    pipe = source.map(spoil)
    for _ in range(2):
        for sample in pipe:
            assert sample["array"].tolist() == [1, 1, 1]
            assert sample["nested"]["list"] == [0, 1]
    spoil(given)
    assert all(sample["tensor"].tolist() == [1, 1] for sample in source)


def test_the_length_is_known_before_and_after_a_split() -> None:
    assert len(MockSamples("a", 0)) == len(list(MockSamples("a", 0))) == 0
    assert len(MockSamples("a", 7)) == len(list(MockSamples("a", 7))) == 7
    assert len(MockSamples("a", 7).sharding_filter()) == 7


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with few cores
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_workers_share_the_samples(workers: int) -> None:
    loader = DataLoader2(MockSamples(numbered, 7).sharding_filter(), reading_service=ShardReadingService(workers))
    assert [list(loader), list(loader)] == [[0, 10, 20, 30, 40, 50, 60]] * 2
    loader.shutdown()
    split = DataLoader(MockSamples(numbered, 7).sharding_filter(), batch_size=None, num_workers=workers)
    assert sorted(split) == [0, 10, 20, 30, 40, 50, 60]


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(TypeError, match=r"length must be an integer, not 2\.0"):
        MockSamples("a", 2.0)  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(ValueError, match="length must be at least 0, not -1"):
        MockSamples("a", -1)


def test_an_error_of_the_function_names_the_sample() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(MockSamples(lambda number: 1 // (number - 2), 5))
    assert getattr(caught.value, "__notes__", []) == ["MockSamples called its function for the sample 2"]
