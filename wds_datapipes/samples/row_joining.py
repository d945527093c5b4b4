"""Join the samples of planned rows, which their marks describe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from wds_datapipes.errors import MissingFieldError, SampleSizeError, plural
from wds_datapipes.samples.fields import (
    ORIGIN,
    PADDING_MARK,
    ROW_MARK,
    WrongItemError,
    describe_sample,
    missing_field_error,
    not_a_sample_error,
)
from wds_datapipes.samples.packing import Piece, RowFormat, check_kinds
from wds_datapipes.types import Sample


class RowMark(NamedTuple):
    """The place of a sample in a planned row: the field ``__row__`` of samples.

    Attributes:
        row: the number of the row in the epoch.
        place: the number of the sample in the row.
        samples: the number of samples in the row.
        start: the first token of the sample in the row; not 0 in a part of a long sample.
        tokens: the number of its tokens, according to the index.
        is_end: whether these are the last ones of the sample.
        row_length: the maximum number of tokens in a row.
        is_padding: whether the row only pads the last step.
        turn: the number of rows that the same pass of the same process read before.
    """

    row: int
    place: int
    samples: int
    start: int
    tokens: int
    is_end: bool
    row_length: int
    is_padding: bool = False
    turn: int = 0


def pack_rows(
    source: Iterable[Sample],
    row_format: RowFormat,
    lists: Collection[str] = (),
    rows_read: Callable[[], int] | None = None,
) -> Iterator[Sample]:
    """Yield planned rows, each when its last sample has arrived. Samples that are padding leave their space empty.

    Args:
        source: the samples, row by row.
        row_format: the fields of a row; its length is that of the plan.
        lists: the fields whose values a row lists, sample by sample.
        rows_read: returns the number of rows that this pass has read, if known; -1 if a handler of errors has ended it.

    Raises:
        MissingFieldError: a sample has no mark, or lacks a field.
        WrongItemError: an item is not a sample, but a batch or a row.
        SampleSizeError: a row is missing, lacks a sample or has it twice, or its samples are longer than planned and do
            not fit.
    """
    kinds = list[tuple[type, Any]]()
    pieces, empty, length, longer = list[Piece](), list[Piece](), 0, ""
    listed = dict[str, list[Any]]()
    mark: RowMark | None = None
    origin: Sample = {}
    for sample in source:
        last, mark = mark, _mark_of(sample)
        piece = row_format.read(sample)
        check_kinds(piece, kinds, sample, row_format.stage)
        _check_order(last, mark, origin, sample)
        origin = {name: sample[name] for name in ORIGIN if name in sample}
        if mark.place == 0:
            pieces, empty, length, longer, listed = [], [], 0, "", {name: [] for name in lists}
        is_padding = mark.is_padding or sample.get(PADDING_MARK)
        for name in lists if not (is_padding or mark.start) else ():  # a part of a sample does not repeat them
            if name not in sample:
                raise missing_field_error(f"pack_rows lists the field {name!r}", sample)
            listed[name].append(sample[name])
        del sample  # its row must not keep it alive
        piece = (
            piece.cut(0, 0) if is_padding else piece.cut(mark.start, None if mark.is_end else mark.start + mark.tokens)
        )
        length += len(piece)
        if len(piece) > mark.tokens and not longer:
            longer = f"{describe_sample(origin)} has {len(piece)} in it, not {mark.tokens} as in the index"
        if length > mark.row_length:
            raise SampleSizeError(
                f"Row {mark.row} has more than {mark.row_length} tokens: {longer}. Build the column of Pack(length=) "
                "again, from the samples as they are packed, with build_indexes(columns=...)"
            )
        (empty if is_padding else pieces).append(piece)
        del piece
        if mark.place + 1 == mark.samples:
            row = replace(row_format, max_length=mark.row_length).join(pieces or empty[:1])
            row |= {"__key__": [each.key for each in pieces], **listed}
            pieces, empty, listed = [], [], {}
            yield row
            del row
    read = None if rows_read is None else rows_read()
    if read == -1:  # perhaps within a row
        return
    end = f"the samples end after {describe_sample(origin)}" if mark is not None else "no sample has arrived"
    if mark is not None and mark.place + 1 < mark.samples:
        raise _lacking_error(mark.row, mark.place + 1, mark.samples, end)
    joined = 0 if mark is None else mark.turn + 1
    if read is not None and (lost := read - joined) > 0:
        raise _error(f"All samples of {plural(lost, 'row')} are missing at the end of the epoch: {end}")


def _mark_of(sample: Any) -> RowMark:
    if not isinstance(sample, dict):
        raise not_a_sample_error("pack_rows", sample)
    if not isinstance(mark := sample.get(ROW_MARK), RowMark):
        if "position_ids" in sample and isinstance(sample.get("__key__"), list):
            raise WrongItemError(
                "pack_rows joins samples, but got a row that .pack_rows() or .pack_samples() has joined. Use one of "
                "these stages, once"
            )
        raise MissingFieldError(
            f"pack_rows joins the rows that IndexedSamples plans with EpochOptions(pack=Pack(...)), but "
            f"{describe_sample(sample)} has no field {ROW_MARK!r}. Pass this option, and keep the field in the stages "
            "in between; for rows of other samples, use .pack_samples()"
        )
    return mark


def _check_order(last: RowMark | None, mark: RowMark, origin: Sample, sample: Sample) -> None:
    """Check that a sample follows the last one in its row, or begins the next row."""
    where = describe_sample(sample)
    if last is not None and last.place + 1 < last.samples:
        if (mark.row, mark.place) == (last.row, last.place + 1):
            return
        if (mark.row, mark.place) == (last.row, last.place):
            raise SampleSizeError(
                f"{where} came twice to row {mark.row}. Between IndexedSamples and .pack_rows(), a stage must yield "
                "one sample for each that it reads, in the same order"
            )
        after = f"{where}, of row {mark.row}, came after {describe_sample(origin)}"
        raise _lacking_error(last.row, last.place + 1, last.samples, after)
    if mark.place:
        raise _lacking_error(mark.row, 0, mark.samples, f"its first sample to arrive is {where}")
    due = 0 if last is None else last.turn + 1
    if mark.turn > due:
        lost = plural(mark.turn - due, "row")
        raise _error(f"All samples of {lost} before row {mark.row} are missing: {_after(where, origin)}")
    if 0 < mark.turn < due:
        raise _error(f"Row {mark.row} came again, or after a later one: {_after(where, origin)}")


def _after(where: str, origin: Sample) -> str:
    return f"{where} came after {describe_sample(origin)}" if origin else f"the first sample to arrive is {where}"


def _lacking_error(row: int, place: int, samples: int, found: str) -> SampleSizeError:
    return _error(f"Row {row} lacks sample {place + 1} of {samples}: {found}")


def _error(found: str) -> SampleSizeError:
    return SampleSizeError(
        f"{found}. Between IndexedSamples and .pack_rows(), no stage may drop, shuffle or repeat samples. Leave "
        "samples out with IndexedSamples(select=) or EpochOptions(exclude=)"
    )
