"""Mapping of samples and of their fields, joining them with a table, and terms that stages for samples share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from wds_datapipes.errors import MissingFieldError, WdsError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, note
from wds_datapipes.types import Sample

Missing: TypeAlias = Literal["raise", "none"]
"""What to do if a sample lacks a value: the choices for ``missing=`` in stages that return values."""

Lacking: TypeAlias = Literal["raise", "keep", "skip"]
"""What to do with a sample that lacks a field or an entry: choices for ``missing=`` in stages that return samples."""

#: What to do with samples of torchdata's stages, whose fields are streams and have a dot in their names.
FROM_TORCHDATA = (
    "Fields with a dot come from torchdata's .load_from_tar().webdataset(): write ShardList(urls).load_wds_shards()"
    ".group_samples() instead"
)

Function: TypeAlias = Callable[[Any], Any]
T = TypeVar("T")

#: The field of `IndexedSamples` that is true for samples that only pad a batch.
PADDING_MARK = "__padding__"
#: The field of `IndexedSamples` that says to which planned row a sample belongs; see `RowMark`.
ROW_MARK = "__row__"
#: The metadata that identify a sample's source, and the marks of padding and rows.
ORIGIN = ("__key__", "__url__", "__local_path__", PADDING_MARK, ROW_MARK)


def map_samples(
    source: Iterable[T], function: Callable[[T], Any], *, on_error: OnError = "raise", stage: str = "map_samples"
) -> Iterator[Any]:
    """Yield the result of a function for each item, unless it is None."""
    policy = ErrorPolicy(on_error, stage)
    for item in policy.counted(source):
        origin = {name: item[name] for name in ORIGIN if name in item} if isinstance(item, dict) else {}
        try:
            mapped = function(item)
        except Exception as error:  # noqa: BLE001 - the policy handles all errors of a user's function
            if origin and not isinstance(error, WdsError | WrongItemError):
                note(error, f"raised in {stage} for {describe_sample(origin)}")
            if policy.handle(error, origin):
                continue
            break
        if mapped is not None:
            yield {**origin, **mapped} if origin and isinstance(mapped, dict) else mapped
    policy.finish()


def map_dict(
    source: Iterable[Sample], functions: Mapping[str, Function], *, on_error: OnError = "raise"
) -> Iterator[Sample]:
    """Yield each sample as a new dictionary, with the functions applied to their fields."""
    policy = ErrorPolicy(on_error, "map_dict")
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error("map_dict", sample)
        mapped = sample.copy()
        field = ""
        try:
            for field, function in functions.items():
                if field not in mapped:
                    raise missing_field_error(f"the field {field!r} was requested", sample)
                mapped[field] = function(mapped[field])
        except Exception as error:  # noqa: BLE001 - the policy handles all errors of a user's function
            note(error, f"raised in map_dict for the field {field!r} of {describe_sample(sample)}")
            if policy.handle(error, sample, field=field):
                continue
            break
        yield mapped
    policy.finish()


def map_tuple(
    source: Iterable[Sequence[Any]], functions: Sequence[Function | None], *, on_error: OnError = "raise"
) -> Iterator[tuple[Any, ...]]:
    """Yield each sequence as a tuple, with the functions applied by position; None leaves an element unchanged."""
    policy = ErrorPolicy(on_error, "map_tuple")
    for values in policy.counted(source):
        if isinstance(values, Mapping):
            raise TypeError("map_tuple needs tuples, but got a sample: put it after to_tuple, or use map_dict")
        try:
            mapped = list(values)
        except TypeError:
            raise TypeError(
                f"map_tuple needs tuples, but got a {type(values).__name__}: put it after to_tuple"
            ) from None
        if len(functions) > len(mapped):
            raise ValueError(
                f"map_tuple has {len(functions)} functions, but got {len(mapped)} elements ({type(values).__name__}). "
                f"Pass at most one function for each element"
            )
        index = 0
        try:
            for index, function in enumerate(functions):
                if function is not None:
                    mapped[index] = function(mapped[index])
        except Exception as error:  # noqa: BLE001 - as above
            note(error, f"raised in map_tuple for element {index} of {len(mapped)}")
            if policy.handle(error):
                continue
            break
        yield tuple(mapped)
    policy.finish()


Entry: TypeAlias = Mapping[str, Any] | None


def associate(
    source: Iterable[Sample],
    table: Mapping[Any, Mapping[str, Any]] | Callable[[Any], Entry],
    *,
    by: str = "__key__",
    missing: Lacking = "raise",
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with additional fields, which are looked up by its key or by another field."""
    find: Callable[[Any], Entry] = table.get if isinstance(table, Mapping) else table

    def join(sample: Sample) -> Sample | None:
        if not isinstance(sample, dict):
            raise not_a_sample_error("associate", sample)
        if by not in sample:
            raise MissingFieldError(f"associate looks up samples by the field {by!r}, but one has only {list(sample)}")
        try:
            entry = find(sample[by])
        except TypeError as error:
            if not isinstance(table, Mapping):  # the user's function
                raise
            raise WrongItemError(
                f"associate looks up samples by {by!r}, but that of {describe_sample(sample)} is a "
                f"{type(sample[by]).__name__}, which cannot be looked up: {error}"
            ) from None
        if entry is None:
            if missing == "raise":
                raise MissingFieldError(
                    f"associate found no entry for {describe_sample(sample)}. "
                    f'Pass missing="keep" to yield such samples unchanged, or missing="skip" to drop them'
                )
            return sample.copy() if missing == "keep" else None
        if not isinstance(entry, Mapping):
            raise WrongItemError(
                f"associate needs dicts of fields, but found a {type(entry).__name__} for {describe_sample(sample)}: "
                f'make it a dict, as in {{"label": {entry!r:.40}}}'
            )
        return {**sample, **entry, **{name: sample[name] for name in ORIGIN if name in sample}}

    return map_samples(source, join, on_error=on_error, stage="associate")


class WrongItemError(TypeError):
    """An item or a table of the wrong type. No error policy skips this error, because all other items are like it."""

    concerns_all = True


def not_a_sample_error(stage: str, item: object) -> WrongItemError:
    """Return the error for an item that is not a sample."""
    advice = {
        "str": "put .load_wds_shards().group_samples() before it, which read shards into samples",
        "Member": "put it after group_samples and before stages such as to_tuple",
        "DataChunk": "put it before .batch()",
    }
    place = advice.get(type(item).__name__, advice["Member"])
    return WrongItemError(f"{stage} needs samples, which are dicts of fields, but got a {type(item).__name__}: {place}")


def missing_field_error(what: str, sample: Sample, advice: str = "") -> MissingFieldError:
    """Return the error for a sample that lacks a field; ``what`` says which one is needed."""
    fields = [name for name in sample if str(name)[:2] != "__"]
    advice = f". {FROM_TORCHDATA}" if any(str(name)[:1] == "." for name in fields) else advice
    return MissingFieldError(f"{what}, but {describe_sample(sample)} has {fields}{advice}")


def describe_sample(sample: Sample) -> str:
    """Describe a sample for a message."""
    return f"the sample {sample.get('__key__')!r} of {redact(str(sample.get('__url__', 'an unknown shard')))}"
