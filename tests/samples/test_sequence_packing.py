"""`pack_samples`: rows of token sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resumed_buffer import check_buffer_resumes
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.errors import MissingFieldError, SampleSizeError
from wds_datapipes.samples.packing import LongSamples, RowFormat, pack_samples
from wds_datapipes.samples.position_buffer import SampleBuffer
from wds_datapipes.shards.position import SamplePosition

LENGTHS = st.lists(st.integers(0, 12), max_size=50)
OPEN_ROWS = st.integers(1, 4)


def samples_of(lengths: list[int]) -> list[dict[str, Any]]:
    """Return samples whose tokens are all different."""
    tokens = np.arange(sum(lengths)) + 1
    parts = np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []
    return [{"__key__": number, "tokens": part, "labels": -part} for number, part in enumerate(parts)]


def run(
    max_length: int, long_samples: LongSamples, open_rows: int, **options: Any
) -> Callable[[Iterator[Any], SampleBuffer, Callable[[], SamplePosition] | None], Iterator[Any]]:
    def start(source: Iterator[Any], buffer: SampleBuffer, position: Any) -> Iterator[Any]:
        row_format = RowFormat(("tokens", "labels"), max_length, **options)
        rows = pack_samples(
            source,
            row_format,
            long_samples=long_samples,
            open_rows=open_rows,
            on_error="raise",
            buffer=buffer,
            position=position,
        )
        for row in rows:
            yield {name: np.asarray(value).tolist() for name, value in row.items()}

    return start


def rows_of(lengths: list[int], *arguments: Any, **options: Any) -> list[dict[str, Any]]:
    return list(run(*arguments, **options)(iter(samples_of(lengths)), SampleBuffer(), None))


@given(LENGTHS, OPEN_ROWS)
def test_each_sample_is_whole_in_one_row_of_bounded_length(lengths: list[int], open_rows: int) -> None:
    rows = rows_of(lengths, 12, "raise", open_rows, layout="cu_seqlens")
    found = {}
    for row in rows:
        assert len(row["tokens"]) <= 12
        assert row["cu_seqlens"][-1] == len(row["tokens"]) == len(row["position_ids"])
        for key, start, end in zip(row["__key__"], row["cu_seqlens"], row["cu_seqlens"][1:], strict=False):
            assert key not in found
            found[key] = row["tokens"][start:end]
            assert row["labels"][start:end] == [-token for token in found[key]]
            assert row["position_ids"][start:end] == list(range(end - start))
    assert found == {sample["__key__"]: sample["tokens"].tolist() for sample in samples_of(lengths)}


@given(LENGTHS, OPEN_ROWS)
def test_segment_ids_number_the_sequences_of_a_row_like_its_keys(lengths: list[int], open_rows: int) -> None:
    tokens = {sample["__key__"]: sample["tokens"].tolist() for sample in samples_of(lengths)}
    for row in rows_of(lengths, 12, "raise", open_rows, pad={"tokens": 0, "labels": -100}):
        assert {len(row[name]) for name in ("tokens", "labels", "segment_ids", "position_ids")} == {12}
        padding = [place for place, segment in enumerate(row["segment_ids"]) if not segment]
        assert padding == list(range(12 - len(padding), 12))
        assert {(row["tokens"][place], row["labels"][place], row["position_ids"][place]) for place in padding} <= {
            (0, -100, 0)
        }
        for number, key in enumerate(row["__key__"], 1):
            own = [token for token, segment in zip(row["tokens"], row["segment_ids"], strict=True) if segment == number]
            assert own == tokens[key]


@given(LENGTHS, OPEN_ROWS, st.integers(1, 12))
def test_split_keeps_all_tokens_and_truncate_the_first_ones(lengths: list[int], open_rows: int, most: int) -> None:
    samples = samples_of(lengths)
    parts: dict[int, list[int]] = {sample["__key__"]: [] for sample in samples}
    for row in rows_of(lengths, most, "split", open_rows, layout="cu_seqlens"):
        assert len(row["tokens"]) <= most
        for key, start, end in zip(row["__key__"], row["cu_seqlens"], row["cu_seqlens"][1:], strict=False):
            parts[key] += row["tokens"][start:end]
    assert {key: sorted(own) for key, own in parts.items()} == {
        sample["__key__"]: sample["tokens"].tolist() for sample in samples
    }
    truncated = rows_of(lengths, most, "truncate", open_rows)
    assert sorted(token for row in truncated for token in row["tokens"]) == [
        token for sample in samples for token in sample["tokens"][:most].tolist()
    ]


@given(LENGTHS, OPEN_ROWS, st.integers(1, 12), st.sampled_from(["truncate", "split"]))
def test_reading_the_held_samples_again_resumes_with_the_same_rows(
    lengths: list[int], open_rows: int, most: int, long_samples: LongSamples
) -> None:
    # A row that is not yet yielded has room for at least one more token.
    check_buffer_resumes(
        run(most, long_samples, open_rows), samples_of(lengths), most=open_rows * max(most - 1, 0) + most
    )


def test_rows_of_tensors_are_tensors_that_own_their_memory() -> None:
    tokens = torch.arange(6, dtype=torch.int32)
    (row,) = IterableWrapper([{"__key__": "a", "tokens": tokens}], deepcopy=False).pack_samples(8, "tokens", pad=9)
    assert row["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
    assert {row[name].dtype for name in ("position_ids", "segment_ids")} == {torch.int64}
    assert row["tokens"].dtype == torch.int32
    tokens.zero_()
    assert row["tokens"][5] == 5


def test_lists_become_arrays_and_empty_samples_keep_their_place() -> None:
    samples = IterableWrapper([{"__key__": str(len(tokens)), "tokens": tokens} for tokens in ([], [1, 2], [3])])
    (row,) = samples.pack_samples(8, "tokens", layout="cu_seqlens")
    assert row["__key__"] == ["0", "2", "1"]
    assert row["cu_seqlens"].tolist() == [0, 0, 2, 3]
    assert (row["tokens"].dtype, row["tokens"].tolist()) == (np.int64, [1, 2, 3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": [1]}, r"packs the field 'tokens', but the sample 'x' .* has \['labels'\]"),
        ({"tokens": [1, 2], "labels": [1]}, r"the same length, but those of the sample 'x' .* tokens: 2, labels: 1"),
        ({"tokens": [[1], [2, 3]], "labels": [1]}, r"one-dimensional .* 'tokens' of the sample 'x' .* is a list"),
        ({"tokens": b"abc", "labels": [1]}, r"one-dimensional .* field 'tokens' of the sample 'x' .* is a bytes"),
        ({"tokens": ["a"], "labels": [1]}, r"arrays of numbers, but the field 'tokens'"),
        ({"tokens": torch.zeros(2, 3), "labels": [1]}, r"is a Tensor of shape \(2, 3\) and torch.float32"),
        ({"tokens": [1.5], "labels": [1]}, r"'x' .* has ndarray of float64, .* samples have ndarray of int64"),
        ({"tokens": [1] * 9, "labels": [1] * 9}, r"the sample 'x' .* has 9 tokens, .* at most max_length=8"),
    ],
)
def test_a_sample_that_cannot_be_packed_is_an_error_or_counted(fields: dict[str, Any], message: str) -> None:
    good = {"__key__": "good", "tokens": [1, 2], "labels": [3, 4]}
    source = IterableWrapper([good, {"__key__": "x", **fields}, good])
    with pytest.raises((SampleSizeError, MissingFieldError), match=message):
        list(source.pack_samples(8, ("tokens", "labels")))
    stage = source.pack_samples(8, ("tokens", "labels"), on_error="skip")
    assert [row["__key__"] for row in stage] == [["good", "good"]]
    assert stage.counters.skipped().total == 1
