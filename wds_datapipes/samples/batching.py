"""Collate samples into batches of columns, and split such batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_choice
from wds_datapipes.errors import plural

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
    if not isinstance(samples, list | tuple):
        raise TypeError(
            f"collate_samples needs a list of samples, but got a {type(samples).__name__}: put .batch(n) first"
        )
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
    are_images = all(getattr(value, "ndim", 0) == 3 for value in values)
    crop = "Decode images to one size with ImageDecoder(crop=RandomResizedCrop(224)). " if are_images else ""
    raise ValueError(
        f"collate_samples stacks tensors and arrays of the same shape, but field {name!r} has "
        f"{', '.join(sorted(map(str, shapes)))}. {crop}Pad them "
        'first, or keep them in a list with functools.partial(collate_samples, ragged="list")'
    )


def explain_collation(batch: object, names: Sequence[str] = ()) -> str:
    """Return the reason why torch's ``default_collate`` has refused a batch, and what to do; "" if it is unknown.

    Args:
        batch: what it has refused.
        names: the names of the fields, if samples are tuples.

    Examples:
        >>> explain_collation([(np.zeros(2),), (np.zeros(3),)], ["npy"]).partition(". ")[0]
        ".collate() cannot stack the field 'npy': the samples of this batch have the shapes (2,) and (3,)"
    """
    if not isinstance(batch, list):
        return (
            f".collate() needs lists of samples, but got a {type(batch).__name__}: put .batch(n) before it, which "
            "makes lists of n samples"
        )
    rows = [dict(each) if isinstance(each, Mapping) else _elements(each, names) for each in batch]
    for name, first in (rows[0] if rows else {}).items():
        values = [row[name] for row in rows if name in row]
        what = f"the field {name!r}" if isinstance(name, str) else f"element {name}"
        if len(values) < len(rows):
            return (
                f".collate() needs samples with the same fields, but some lack {what}. Select fields with .to_tuple()"
            )
        kinds = sorted({type(value).__name__ for value in values})
        if len(kinds) > 1:
            return f".collate() needs values of one type in {what}, but this batch has {', '.join(kinds)}"
        if isinstance(first, np.ndarray) or _is_tensor(first):
            shapes = sorted({tuple(value.shape) for value in values})
            if len(shapes) > 1:
                return _explain_shapes(what, shapes)
        elif isinstance(first, Mapping | list | tuple):
            if len({tuple(value) if isinstance(value, Mapping) else len(value) for value in values}) > 1:
                return (
                    f".collate() needs {kinds[0]}s of one size in {what}. Select what the loop needs with "
                    ".map_samples(f), or keep lists and dicts with .collate(collate_fn=collate_samples)"
                )
        elif not isinstance(first, int | float | str | bytes):
            return (
                f".collate() stacks tensors, arrays and numbers, but {what} is a {kinds[0]}. Decode images with "
                '.wds_decode("torchrgb8"), or keep objects in lists with .collate(collate_fn=collate_samples)'
            )
    return ""


def _elements(sample: object, names: Sequence[str]) -> dict[Any, Any]:
    values = sample if isinstance(sample, tuple | list) else (sample,)
    return {names[number] if number < len(names) else number: value for number, value in enumerate(values)}


def _explain_shapes(what: str, shapes: Sequence[tuple[int, ...]]) -> str:
    others = [plural(len(shapes) - 3, "other")] if len(shapes) > 3 else []
    listed = " and ".join([*map(str, shapes[:3]), *others])
    found = f".collate() cannot stack {what}: the samples of this batch have the shapes {listed}. "
    if all(len(shape) == 3 for shape in shapes):
        return (
            f"{found}Decode images to one size, as in "
            '.wds_decode(ImageDecoder("torchrgb8", crop=RandomResizedCrop(224))), or with crop=CenterCrop(224)'
        )
    return (
        f"{found}Pad them in a function, .collate(collate_fn=f), or keep them in a list with "
        '.collate(collate_fn=partial(collate_samples, ragged="list"))'
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
