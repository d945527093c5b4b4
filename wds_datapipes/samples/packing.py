"""Pack token sequences into rows of bounded length."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from wds_datapipes.arguments import check_choice
from wds_datapipes.errors import SampleError, SampleSizeError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.samples.fields import (
    PADDING_MARK,
    ROW_MARK,
    WrongItemError,
    describe_sample,
    missing_field_error,
    not_a_sample_error,
)
from wds_datapipes.samples.position_buffer import SampleBuffer
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Sample

Layout: TypeAlias = Literal["segment_ids", "cu_seqlens"]
"""How a row marks its sequences: by a number for each token, or by the offsets of the sequences."""

LongSamples: TypeAlias = Literal["raise", "truncate", "split"]
"""What to do with sequences longer than a row: raise an error, keep the beginning, or split them into several."""


class Piece(NamedTuple):
    """A sequence of tokens: a sample or a part of one.

    Attributes:
        key: the key of the sample.
        arrays: the values of each packed field, which all have the same length.
    """

    key: Any
    arrays: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def cut(self, start: int, end: int | None = None) -> Piece:
        """Return a part of the sequence."""
        return Piece(self.key, tuple(array[start:end] for array in self.arrays))


@dataclass(frozen=True)
class RowFormat:
    """The fields and the maximum length of a row.

    Args:
        fields: the names of the fields to pack.
        max_length: the maximum number of tokens in a row.
        layout: how a row marks its sequences.
        pad: the value with which each field is padded to ``max_length``; by default, rows are not padded.
        stage: the stage, for messages.

    Raises:
        TypeError: a name is not a string.
        ValueError: an argument is invalid.
    """

    fields: tuple[str, ...]
    max_length: int
    layout: Layout = "segment_ids"
    pad: Mapping[str, float] | None = None
    stage: str = "pack_samples"

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in self.fields):
            example = '.pack_rows("tokens", "labels")' if self.stage == "pack_rows" else '["tokens", "labels"]'
            raise TypeError(f"fields must be names of fields, as in {example}, not {self.fields!r}")
        added = ("__key__", "position_ids", *get_args(Layout))
        if not self.fields or len({*self.fields, *added}) < len(self.fields) + len(added):
            raise ValueError(f"{self.stage} needs fields with distinct names, other than {added}, not {self.fields}")
        check_choice("layout", self.layout, Layout)
        if self.pad is not None and self.layout == "cu_seqlens":
            raise ValueError('pad fills up rows with layout="segment_ids"; the offsets of "cu_seqlens" need no padding')
        if self.pad is not None and self.pad.keys() != {*self.fields}:
            raise ValueError(f"pad needs a value for each of the fields {self.fields}, not {dict(self.pad)}")
        pads: Collection[Any] = (self.pad or {}).values()  # users may pass anything
        if wrong := [value for value in pads if not isinstance(value, Real)]:
            raise TypeError(f"pad must be a number, or one for each field by name, not {wrong[0]!r:.100}")

    def read(self, sample: Any) -> Piece:
        """Return the tokens of a sample.

        Raises:
            MissingFieldError: a field is missing.
            SampleSizeError: the fields are not one-dimensional arrays of the same length.
            TypeError: the argument is not a sample.
        """
        if not isinstance(sample, dict):
            raise not_a_sample_error(self.stage, sample)
        for name in self.fields:
            if name not in sample:
                raise missing_field_error(f"{self.stage} packs the field {name!r}", sample)
        piece = Piece(sample.get("__key__"), tuple(_as_array(sample, name, self.stage) for name in self.fields))
        lengths = [*map(len, piece.arrays)]
        if len({*lengths}) > 1:
            raise SampleSizeError(
                f"{self.stage} needs fields of the same length, but those of {describe_sample(sample)} have "
                f"{', '.join(f'{name}: {length}' for name, length in zip(self.fields, lengths, strict=True))}"
            )
        return piece

    def join(self, pieces: Sequence[Piece]) -> Sample:
        """Return a row that consists of several sequences.

        Raises:
            SampleSizeError: a field of integers cannot have the value with which it is padded.
        """
        lengths = [*map(len, pieces)]
        offsets = np.cumsum([0, *lengths])
        length = int(offsets[-1])
        missing = 0 if self.pad is None else self.max_length - length
        row: Sample = {"__key__": [piece.key for piece in pieces]}
        for number, name in enumerate(self.fields):
            value = 0 if self.pad is None else self.pad[name]
            _check_pad(value, name, pieces[0].arrays[number].dtype)
            row[name] = _concatenate([piece.arrays[number] for piece in pieces], missing, value)
        row["position_ids"] = np.zeros(length + missing, np.int64)
        row["position_ids"][:length] = np.arange(length) - np.repeat(offsets[:-1], lengths)
        if self.layout == "segment_ids":
            row["segment_ids"] = np.zeros(length + missing, np.int64)
            row["segment_ids"][:length] = np.repeat(np.arange(1, len(pieces) + 1), lengths)
        else:
            row["cu_seqlens"] = offsets.astype(np.int32)
        if not isinstance(row[self.fields[0]], np.ndarray):
            for name in ("position_ids", self.layout):
                row[name] = sys.modules["torch"].from_numpy(row[name])
        return row


class _OpenRows:
    """Rows with space for more tokens.

    Args:
        max_length: the maximum number of tokens in a row.
        limit: the maximum number of rows.
    """

    def __init__(self, max_length: int, limit: int) -> None:
        self._max_length, self._limit = max_length, limit
        self._rooms: list[tuple[int, int]] = []  # the space and the number of each row, sorted
        self._rows: dict[int, list[tuple[Piece, int]]] = {}
        self._begun = 0

    def add(self, piece: Piece, number: int) -> int | None:
        """Add a sequence to the row that it fills best; return the number of a row that is now finished, if any.

        Args:
            piece: the sequence.
            number: the number of its sample.
        """
        length = max(len(piece), 1)  # an empty one takes space, too, to bound their number
        at = bisect_left(self._rooms, (length, -1))
        if at < len(self._rooms):
            room, row = self._rooms.pop(at)
        else:
            room, row = self._max_length, self._begun
            self._rows[row] = []
            self._begun += 1
        self._rows[row].append((piece, number))
        if room == length:
            return row
        insort(self._rooms, (room - length, row))
        return self._rooms.pop(0)[1] if len(self._rooms) > self._limit else None

    def pop(self, row: int) -> list[tuple[Piece, int]]:
        """Remove a row and return its sequences with the numbers of their samples."""
        return self._rows.pop(row)

    def finish(self) -> list[int]:
        """Return the numbers of all rows, oldest first."""
        return sorted(self._rows)


def pack_samples(
    source: Iterable[Sample],
    row_format: RowFormat,
    *,
    long_samples: LongSamples,
    open_rows: int,
    on_error: OnError,
    buffer: SampleBuffer,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[Sample]:
    """Yield rows of several samples, each when it is full; if there are too many open rows, yield the fullest.

    A sample is added to the row in which it leaves the least space. This choice does not depend on finished rows, so
    reading the other samples again leads to the same rows. Padding is dropped.

    Args:
        source: the samples, preceded by those in ``buffer``.
        row_format: the fields and the length of a row.
        long_samples: what to do with samples that are longer than a row.
        open_rows: the maximum number of rows that wait for more samples.
        on_error: the policy for samples that cannot be packed.
        buffer: the samples in rows that are not yielded; updated in place.
        position: returns the position of the last item of ``source``, if known.

    Raises:
        WrongItemError: a sample belongs to a planned row.
    """
    policy = ErrorPolicy(on_error, "pack_samples")
    max_length = row_format.max_length
    rows = _OpenRows(max_length, open_rows)
    kinds: list[tuple[type, Any]] = []

    def take(row: int) -> Sample:
        pieces = rows.pop(row)
        buffer.remove([number for _, number in pieces])
        return row_format.join([piece for piece, _ in pieces])

    sample: Any  # stages may yield anything
    for sample in policy.counted(buffer.read(source, position)):
        if isinstance(sample, dict) and ROW_MARK in sample:
            raise WrongItemError(
                f"pack_samples got {describe_sample(sample)} of a row that IndexedSamples has planned. Join it by "
                ".pack_rows(), so that each rank has as many rows, or leave EpochOptions(pack=) out"
            )
        try:
            piece = row_format.read(sample)
            if sample.get(PADDING_MARK):
                continue
            check_kinds(piece, kinds, sample, row_format.stage)
            if len(piece) > max_length and long_samples == "raise":
                raise SampleSizeError(
                    f"{describe_sample(sample)} has {len(piece)} tokens, but a row of pack_samples has at most "
                    f'max_length={max_length}. Pass long_samples="truncate" or "split", or skip it with on_error="skip"'
                )
        except SampleError as error:
            if policy.handle(error, sample):
                continue
            break
        del sample  # its row must not keep it alive
        if long_samples == "truncate":
            piece = piece.cut(0, max_length)
        number, length = buffer.add(), len(piece)
        whole = length - length % max_length
        begin = 0
        if buffer.again >= 0:  # it is read again, after the rows that it filled alone were yielded
            begin = buffer.cut if buffer.cut and not buffer.again else whole
        for start in range(begin, whole, max_length):
            end = start + max_length
            buffer.cut_part(start, end % length)
            yield row_format.join([piece.cut(start, end)])
        if buffer.again <= 0:
            buffer.cut = 0
        if whole < length or not length:
            row = rows.add(piece.cut(whole), number)
            del piece
            if row is not None:
                yield take(row)
    policy.finish()
    for row in rows.finish():
        yield take(row)


def _as_array(sample: Sample, name: str, stage: str) -> Any:
    """Return a field as a one-dimensional array or tensor."""
    value = sample[name]
    if isinstance(value, list | tuple):
        with suppress(ValueError):  # such as lists of different lengths, which are rejected below
            value = np.array(value, None if value else np.int64)
    if getattr(value, "ndim", None) != 1 or (isinstance(value, np.ndarray) and value.dtype.kind not in "biuf"):
        what = type(sample[name]).__name__
        what += f" of shape {tuple(value.shape)} and {value.dtype}" if hasattr(value, "shape") else ""
        raise SampleSizeError(
            f"{stage} joins one-dimensional arrays of numbers, but the field {name!r} of "
            f"{describe_sample(sample)} is a {what}"
        )
    return value


def check_kinds(piece: Piece, kinds: list[tuple[type, Any]], sample: Sample, stage: str) -> None:
    """Check that arrays have the same types as previous ones, which ``kinds`` lists.

    Raises:
        SampleSizeError: the types differ.
    """
    found = [(type(array), array.dtype) for array in piece.arrays]
    kinds += [] if kinds else found
    if found != kinds:
        old, new = (", ".join(f"{kind.__name__} of {dtype}" for kind, dtype in each) for each in (kinds, found))
        raise SampleSizeError(
            f"{stage} joins arrays of the same type, but {describe_sample(sample)} has {new}, and earlier samples "
            f"have {old}. Convert them first, for example with .map_dict()"
        )


def _check_pad(value: float, name: str, dtype: Any) -> None:
    """Check that values of a type of NumPy or torch can pad a field: integers would wrap around."""
    kind = str(dtype).removeprefix("torch.")
    if kind != "bool" and "int" not in kind:
        return
    least, most = (0, 1) if kind == "bool" else (np.iinfo(kind).min, np.iinfo(kind).max)
    if not (least <= value <= most and value == int(value)):
        raise SampleSizeError(
            f"pad={value} does not fit into the field {name!r}, whose values are {kind}. Pass another value, by field "
            "name if only some fields need it, or convert the field first, for example with .map_dict()"
        )


def _concatenate(arrays: Sequence[Any], missing: int, value: float) -> Any:
    """Concatenate arrays or tensors, and append a value ``missing`` times."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate([*arrays, np.full(missing, value, arrays[0].dtype)])
    return sys.modules["torch"].cat([*arrays, arrays[0].new_full((missing,), value)])
