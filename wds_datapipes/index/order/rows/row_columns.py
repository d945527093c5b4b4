"""The columns of an index from which rows are planned: lengths, costs, and a second bound, as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import SampleSizeError, plural
from wds_datapipes.index.format.options import Column, Pack
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.select import values_of

#: Costs that are not integers are rounded to this number of bits.
COST_BITS = 30
#: The maximum sum of a column, so that no sum of its values overflows.
MAX_SUM = 1 << 62


class Samples(NamedTuple):
    """The samples that a dataset has or selects.

    Attributes:
        shards: the shard of each selected sample.
        numbers: the number of each in its shard.
        starts: the number of the first sample of each shard among all samples.
        read_index: returns the index of a shard.
        key_of: returns the key of a selected sample, by its number among them.
    """

    shards: Numbers
    numbers: Numbers
    starts: Numbers
    read_index: Callable[[int], ShardIndex]
    key_of: Callable[[int], str]


class RowColumns(NamedTuple):
    """Values of each selected sample, in the order of the shards.

    Attributes:
        lengths: the number of tokens.
        costs: the cost; None for the length.
        seconds: the value that a second bound limits; None without one.
        exponent: that of the power of two that makes costs integers; None if they are. It depends on all of them.
    """

    lengths: npt.NDArray[np.integer[Any]]
    costs: npt.NDArray[Any] | None
    seconds: npt.NDArray[np.integer[Any]] | None
    exponent: int | None = None

    def costs_of(self, numbers: Numbers) -> Numbers:
        """Return the costs of some samples as integers: scaling and rounding are exact on all machines."""
        found = (self.lengths if self.costs is None else self.costs)[numbers]
        return (found if self.exponent is None else np.rint(np.ldexp(found, self.exponent))).astype(np.int64)


def measure_rows(pack: Pack, samples: Samples, sizes: Numbers) -> RowColumns:
    """Return the columns of the selected samples.

    Args:
        pack: names the columns.
        samples: the samples.
        sizes: the number of samples in each shard, selected or not.

    Raises:
        KeyError: an index has no such column.
        TypeError: lengths are not numbers.
        ValueError: a value is not a number, negative, or too large, or there are more or fewer values than samples.
        SampleSizeError: a sample does not fit into a row.
    """
    lengths = _whole("length", _values("length", pack.length, samples, sizes), samples)
    costs, exponent = None, None
    if pack.cost is not None:
        costs, exponent = _scale("cost", _values("cost", pack.cost, samples, sizes), samples)
    if pack.long_samples == "raise":
        _check_fit(
            lengths, pack.row, samples, "tokens", 'Pass Pack(long_samples="truncate") or "split", or a larger row'
        )
    seconds = None
    if pack.second is not None:
        column, most = pack.second
        seconds = _whole("second", _values("second", column, samples, sizes), samples)
        _check_fit(
            seconds, most, samples, f"in {column!r}" if isinstance(column, str) else "in second", "Raise the limit"
        )
    return RowColumns(_narrow(lengths), costs, None if seconds is None else _narrow(seconds), exponent)


def _values(name: str, column: Column, samples: Samples, sizes: Numbers) -> npt.NDArray[Any]:
    """Return the values of a column for the selected samples."""
    if not (isinstance(column, str) or callable(column)):
        return _checked(name, np.asarray(column), len(samples.shards), "of the dataset")
    parts = []
    for shard, size in enumerate(sizes.tolist()):
        index = samples.read_index(shard)
        found = index.columns[column] if isinstance(column, str) else values_of(name, column, index)
        owner = f"of {index.columns.index_name}"
        parts.append(_checked(name, np.asarray(found), size, owner) if size else np.empty(0, np.int64))
    chosen: npt.NDArray[Any] = np.concatenate(parts)[samples.starts[samples.shards] + samples.numbers]
    return chosen


def _checked(name: str, found: npt.NDArray[Any], count: int, owner: str) -> npt.NDArray[Any]:
    if found.shape != (count,):
        raise ValueError(f"{name}= of Pack needs {count} values, one per sample {owner}, not the shape {found.shape}")
    if count and found.dtype.kind not in "iuf":
        raise TypeError(f"{name}= of Pack must be numbers, but those {owner} are {found.dtype}")
    return found


def _refuse(name: str, values: npt.NDArray[Any], is_wrong: npt.NDArray[np.bool_], samples: Samples, need: str) -> None:
    """Raise ValueError if some values are wrong; it names the first of their samples."""
    if is_wrong.any():
        first = int(is_wrong.argmax())
        raise ValueError(
            f"{name}= of Pack has {values[first]} for the sample {samples.key_of(first)!r}, and wrong values for "
            f"{plural(int(is_wrong.sum()), 'sample')} in all: each must be {need}. Correct the column with "
            "build_indexes(columns=...), or leave such samples out with select="
        )


def _whole(name: str, values: npt.NDArray[Any], samples: Samples) -> Numbers:
    """Return values that must be integers from 0."""
    with np.errstate(invalid="ignore"):
        is_wrong = ~((values >= 0) & (values < 1 << 31))
        if values.dtype.kind == "f":
            is_wrong |= values != np.floor(values)
    _refuse(name, values, is_wrong, samples, "an integer from 0 below 2**31")
    return values.astype(np.int64)


def _scale(name: str, values: npt.NDArray[Any], samples: Samples) -> tuple[npt.NDArray[Any], int | None]:
    """Return costs, and the exponent of the power of two that makes them integers; None if they are."""
    with np.errstate(invalid="ignore"):
        _refuse(name, values, ~((values >= 0) & (values < np.inf)), samples, "a finite number from 0")
    if values.dtype.kind != "f" and int(values.max(initial=0)) * len(values) < MAX_SUM:
        return values.astype(np.int64), None
    values = values.astype(np.float64)
    return values, COST_BITS - int(np.frexp(values.max(initial=0))[1])


def _check_fit(values: Numbers, most: int, samples: Samples, what: str, advice: str) -> None:
    if len(values) and values.max() > most:
        first, count = int(values.argmax()), int((values > most).sum())
        raise SampleSizeError(
            f"The sample {samples.key_of(first)!r} has {values[first]:,} {what}, but a row of Pack at most {most:,}; "
            f"{plural(count, 'sample')} of {len(values):,} exceed it. {advice}, or leave such samples out with select="
        )


def _narrow(values: Numbers) -> npt.NDArray[np.integer[Any]]:
    """Return values below 2**31 in 4 bytes each."""
    return values.astype(np.int32)
