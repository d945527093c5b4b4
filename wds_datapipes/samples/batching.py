"""Collating samples into batches of columns, and unbatching."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_choice

#: The kinds of columns, for messages.
KINDS = "tensors, arrays and lists"

Ragged: TypeAlias = Literal["raise", "list"]


def collate_samples(
    samples: Sequence[Any],
    *,
    combine_tensors: bool = True,
    combine_scalars: bool = True,
    ragged: Ragged = "raise",
) -> Any:
    """Collate samples into one batch as webdataset does, for ``.batch(n).collate(collate_fn=collate_samples)``.

    Numbers become a NumPy array; tensors and arrays are stacked; everything else is a list: strings, bytes, None, PIL
    images, and dicts and lists of any length, as in JSON. torch's own collation, the default of ``.collate()``, makes
    tensors of numbers and arrays, recurses into dicts and lists, and rejects None, PIL images and lists of different
    lengths.

    Args:
        samples: dicts with the same keys, collated into a dict of columns; or tuples of the same length, into a tuple.
        combine_tensors: stack tensors and arrays instead of returning lists.
        combine_scalars: make arrays of numbers instead of returning lists.
        ragged: what to do with tensors and arrays of different shapes: ``"raise"``, or keep them in a ``"list"``.

    Raises:
        ValueError: there are no samples, or they have different keys or lengths, or tensors of different shapes.
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
    """Yield the samples of each batch, in the structure of the batch: a dict of columns becomes dicts."""
    for batch in source:
        columns = list(_columns(batch, ()))
        if not columns:
            raise ValueError(
                f"unbatch_samples needs batches of columns ({KINDS}), but got a {type(batch).__name__} without columns"
            )
        path, count = columns[0]
        for other, length in columns:
            if length != count:
                raise ValueError(
                    f"unbatch_samples needs columns of the same length, but {_describe_path(path)} has {count} items "
                    f"and {_describe_path(other)} has {length}. A list in a batch is one column"
                )
        yield from _rows(batch, ())


def _columns(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the path and the length of each column of a batch."""
    parts = _parts(value, path)
    if parts is None:
        yield path, len(value)
    else:
        for name, part in parts:
            yield from _columns(part, (*path, name))


def _rows(value: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the samples of a batch, or of a part of one."""
    parts = _parts(value, path)
    if parts is None:
        return iter(value.unbind(0)) if _is_tensor(value) else iter(value)
    names = [name for name, _ in parts]
    rows: Iterator[tuple[Any, ...]] = itertools.repeat(())  # a group without columns; the lengths are compared above
    if parts:
        rows = zip(*(_rows(part, (*path, name)) for name, part in parts), strict=False)
    if isinstance(value, Mapping):
        return (dict(zip(names, row, strict=True)) for row in rows)
    if isinstance(value, list):
        return map(list, rows)
    return map(value._make, rows) if hasattr(value, "_make") else rows


def _parts(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
    """Return the parts of a group of columns with their names, or None for a column.

    A list or tuple without possible columns, such as one of strings, is itself a column: torch collates strings into
    a list or a tuple, depending on the case.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        grouping = isinstance(value, tuple) or not path
        return list(enumerate(value)) if grouping and any(map(_may_be_column, value)) else None
    if not _may_be_column(value):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise TypeError(
            f"unbatch_samples needs batches of columns ({KINDS}), but got a {type(value).__name__}{shape} in "
            f"{_describe_path(path)}. To split lists of samples, use .unbatch()"
        )
    return None


def _may_be_column(value: Any) -> bool:
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return bool(value.ndim)
    return isinstance(value, list | tuple | Mapping)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # without it, there is no tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _describe_path(path: tuple[Any, ...]) -> str:
    return "batch" + "".join(f"[{name!r}]" for name in path)
