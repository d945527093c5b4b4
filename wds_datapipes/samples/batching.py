"""Collate samples into batches of columns, and split such batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_choice

#: The kinds of columns, for messages.
KINDS = "tensors, arrays and lists"

Ragged: TypeAlias = Literal["raise", "list"]


def collate_samples(
    samples: Sequence[Any], *, combine_tensors: bool = True, combine_scalars: bool = True, ragged: Ragged = "raise"
) -> Any:
    """Collate samples into a batch as webdataset does, for ``.batch(n).collate(collate_fn=collate_samples)``.

    Numbers become a NumPy array; tensors and arrays are stacked; all other values become lists: strings, bytes, None,
    PIL images, and dicts and lists of any length, as in JSON. torch's own collation, the default of ``.collate()``,
    turns numbers and arrays into tensors, recurses into dicts and lists, and rejects None, PIL images and lists of
    different lengths.

    Args:
        samples: dicts with the same keys, which are collated into a dict of columns, or tuples of the same length,
            which are collated into a tuple.
        combine_tensors: stack tensors and arrays instead of returning lists.
        combine_scalars: combine numbers into arrays instead of returning lists.
        ragged: what to do with tensors and arrays of different shapes: ``"raise"``, or keep them in a ``"list"``.

    Raises:
        ValueError: there are no samples, or they differ in their keys or lengths, or in the shapes of tensors.
        TypeError: a sample is neither a dict nor a tuple.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"json": [1, 2], "cls": 3}, {"json": [4], "cls": 5}])
        >>> list(samples.batch(2).collate(collate_fn=collate_samples))
        [{'json': [[1, 2], [4]], 'cls': array([3, 5])}]
    """
    check_choice("ragged", ragged, Ragged)
    if not samples:
        raise ValueError("collate_samples needs at least one sample, but got none")
    rows = [_named_values(sample) for sample in samples]
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys() or isinstance(samples[number], Mapping) != isinstance(samples[0], Mapping):
            raise ValueError(
                f"collate_samples needs samples with the same fields, but sample 0 has {list(rows[0])} and sample "
                f"{number} has {list(row)}. Select the fields with to_tuple or select_fields"
            )
    columns = {
        name: _column([row[name] for row in rows], name, combine_tensors, combine_scalars, ragged) for name in rows[0]
    }
    return columns if isinstance(samples[0], Mapping) else tuple(columns.values())


def _named_values(sample: object) -> Mapping[Any, Any]:
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, list | tuple):
        return dict(enumerate(sample))
    raise TypeError(f"collate_samples needs dicts or tuples, but got a {type(sample).__name__}")


def _column(values: list[Any], name: object, combine_tensors: bool, combine_scalars: bool, ragged: Ragged) -> Any:
    """Return the values of one field as an array, a tensor or a list."""
    if all(isinstance(value, int | float) for value in values):
        return np.array(values) if combine_scalars else values
    torch = sys.modules.get("torch")
    kinds = (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)
    if not combine_tensors or not isinstance(values[0], kinds):
        return values
    kind = next(kind for kind in kinds if isinstance(values[0], kind))
    shapes = {tuple(value.shape) if isinstance(value, kind) else type(value).__name__ for value in values}
    if len(shapes) == 1:
        return np.array(values) if torch is None or kind is np.ndarray else torch.stack(values)
    if ragged == "list":
        return values
    raise ValueError(
        f"collate_samples stacks tensors and arrays of the same shape, but field {name!r} has "
        f"{', '.join(sorted(map(str, shapes)))}. Pad them first, or keep them in a list with "
        f'functools.partial(collate_samples, ragged="list")'
    )


def unbatch_samples(source: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples of each batch in the structure of the batch: a dict of columns becomes dicts."""
    for batch in source:
        columns = _columns(batch)
        names, lengths = list(columns), [*map(len, columns.values())]
        for name, length in zip(names, lengths, strict=True):
            if length != lengths[0]:
                raise ValueError(
                    f"unbatch_samples needs columns of the same length, but {names[0]!r} has {lengths[0]} items and "
                    f"{name!r} has {length}. A list in a batch is one column"
                )
        rows = zip(*(each.unbind(0) if _is_tensor(each) else each for each in columns.values()), strict=True)
        if isinstance(batch, Mapping):
            yield from (dict(zip(names, row, strict=True)) for row in rows)
        elif columns[0] is batch:
            yield from (value for (value,) in rows)
        elif hasattr(batch, "_make"):
            yield from map(batch._make, rows)
        else:
            yield from map(type(batch), rows)


def _columns(batch: Any) -> Any:
    """Return the columns of a batch by name or position.

    A list or tuple that contains no possible column, such as one of strings, is itself a column, because torch may
    collate strings into a list or a tuple.
    """
    is_group = isinstance(batch, list | tuple) and any(map(_is_column, batch))
    columns = batch if isinstance(batch, Mapping) else dict(enumerate(batch if is_group else [batch]))
    for name, column in columns.items():
        if not _is_column(column):
            shape = f" of shape {tuple(column.shape)}" if hasattr(column, "shape") else ""
            raise TypeError(
                f"unbatch_samples needs batches of columns ({KINDS}), but got a {type(column).__name__}{shape} in "
                f"{name!r}. To split lists of samples, use .unbatch(); to split dicts in a batch, take them out first"
            )
    if not columns:
        raise ValueError(f"unbatch_samples needs batches of columns ({KINDS}), but got an empty {type(batch).__name__}")
    return columns


def _is_column(value: Any) -> bool:
    return bool(value.ndim) if isinstance(value, np.ndarray) or _is_tensor(value) else isinstance(value, list | tuple)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # without it, there is no tensor
    return torch is not None and isinstance(value, torch.Tensor)
