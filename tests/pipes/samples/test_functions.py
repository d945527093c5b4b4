"""Functions of whole streams, generated samples, and decoders, in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import MockSamples
from wds_datapipes.errors import UnsafeInputError


def test_an_interrupted_stream_is_closed() -> None:
    closed: list[str] = []

    def watched(name: str, numbers: Iterator[int]) -> Iterator[int]:
        try:
            yield from numbers
        finally:
            closed.append(name)

    iterator = iter(IterableWrapper(range(10)).compose(partial(watched, "inner"), partial(watched, "outer")))
    assert next(iterator) == 0
    del iterator
    gc.collect()
    assert sorted(closed) == ["inner", "outer"]


def test_a_function_that_does_not_return_an_iterable_is_named_and_its_own_errors_are_unchanged() -> None:
    def wrong(numbers: Iterator[int]) -> Any:
        return 3

    def broken(numbers: Iterator[Any]) -> Iterator[Any]:
        for number in numbers:
            yield number + "a"

    with pytest.raises(TypeError, match=r"wrong.* must return an iterable, but returned 3"):
        list(IterableWrapper([1]).compose(wrong))
    with pytest.raises(TypeError, match="unsupported operand"):
        list(IterableWrapper([1]).compose(broken))


def spoil(sample: dict[str, Any]) -> dict[str, Any]:
    sample["array"] += 1
    sample["nested"]["list"].append(1)
    sample["tensor"].zero_()
    return sample


def test_changes_of_a_mock_sample_affect_no_other_one() -> None:
    given = {"array": np.zeros(3), "nested": {"list": [0]}, "tensor": torch.ones(2)}
    source = MockSamples(given, 3)
    pipe = source.map(spoil)
    for _ in range(2):
        for sample in pipe:
            assert sample["array"].tolist() == [1, 1, 1]
            assert sample["nested"]["list"] == [0, 1]
    spoil(given)
    assert [sample["tensor"].tolist() for sample in source] == [[1, 1]] * 3
    assert len(source) == len(source.sharding_filter()) == 3


@pytest.mark.parametrize("extension", ["cls", "source_dp", "self"])
def test_an_extension_may_have_the_name_of_a_parameter(extension: str) -> None:
    decoders = {extension: lambda data: "decoded"}
    assert list(IterableWrapper([{extension: b"1"}]).wds_decode(**decoders)) == [{extension: "decoded"}]


def test_decoding_passes_every_option_on() -> None:
    samples: IterDataPipe[Any] = IterableWrapper(
        [{"cls": b"1", "pkl": b"I1\n.", "txt": 3}, {"cls": b"x", "pkl": b"I1\n.", "txt": 3}]
    )
    stage = samples.wds_decode(only="cls pkl txt", partial=True, allow_pickle=True, on_error="skip")
    assert list(stage) == [{"cls": 1, "pkl": 1, "txt": 3}]
    with pytest.raises(UnsafeInputError, match="allow_pickle=True"):
        list(samples.wds_decode(on_error="skip"))
