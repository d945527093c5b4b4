"""Selecting, renaming and mapping the fields of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from wds_datapipes.errors import MissingFieldError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, note
from wds_datapipes.types import Sample
from wds_datapipes.user_warnings import warn_user

Missing: TypeAlias = Literal["raise", "none"]
"""What to do if a value is missing in a sample: the words of ``missing=`` in stages that return values."""

Lacking: TypeAlias = Literal["raise", "keep", "skip"]
"""What to do with a sample that lacks a field or an entry: the words of ``missing=`` in stages that return samples."""

Function: TypeAlias = Callable[[Any], Any]
T = TypeVar("T")

#: A name that no field has, so that a sample's ``get`` returns None.
NO_FIELD = "\0"

#: The field of `IndexedSamples` that is true for samples that only fill up a batch.
PADDING_MARK = "__padding__"
#: The metadata that identify a sample's source, and whether it is padding.
ORIGIN = ("__key__", "__url__", "__local_path__", PADDING_MARK)


def parse_specs(specs: Sequence[str]) -> list[tuple[str, ...]]:
    """Split field specs into their alternatives.

    >>> parse_specs(["jpg;png", "cls"]) == parse_specs(["jpg;png cls"]) == [("jpg", "png"), ("cls",)]
    True
    """
    for text in specs:
        if not isinstance(text, str):
            raise TypeError(f'a field must be a string, as in "jpg;png", "cls", not {text!r}')
    parsed = [tuple(filter(None, spec.split(";"))) for text in specs for spec in text.split()]
    if not parsed or () in parsed:
        raise ValueError(f'fields must be given as in "jpg;png", "cls" (";" separates alternatives), not {specs!r}')
    return parsed


def to_tuple(
    source: Iterable[Sample], specs: Sequence[str], *, missing: Missing = "raise", on_error: OnError = "raise"
) -> Iterator[tuple[Any, ...]]:
    """Yield the named fields of each sample as a tuple."""
    policy = ErrorPolicy(on_error, "to_tuple")
    alternatives = parse_specs(specs)
    # Samples share a few sets of fields; the choice is cached for each set.
    chosen: dict[tuple[str, ...], list[str]] = {}
    has_warned = False
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error("to_tuple", sample)
        names = chosen.get(fields := tuple(sample))
        if names is None:
            try:
                names = [_choose(sample, options, missing) for options in alternatives]
            except MissingFieldError as error:
                if policy.handle(error, sample):
                    continue
                break
            cache_selection(chosen, fields, names)
        if sample.get(PADDING_MARK) and PADDING_MARK not in names and not has_warned:
            warn_of_padding("to_tuple")
            has_warned = True
        yield tuple(map(sample.get, names))
    policy.finish()


def rename(
    source: Iterable[Sample], new: Mapping[str, str], *, keep: bool = True, on_error: OnError = "raise"
) -> Iterator[Sample]:
    """Yield each sample with its fields under new names."""
    policy = ErrorPolicy(on_error, "rename")
    alternatives = list(zip(new, parse_specs(list(new.values())), strict=True))
    taken = frozenset(name for _, names in alternatives for name in names)
    chosen: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # as above: pairs of new and old names
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error("rename", sample)
        names = chosen.get(fields := tuple(sample))
        if names is None:
            kept = {name: name for name in fields if name[:2] == "__" or (keep and name not in taken)}
            try:
                names = [*{**kept, **{name: _choose(sample, options) for name, options in alternatives}}.items()]
            except MissingFieldError as error:
                if policy.handle(error, sample):
                    continue
                break
            cache_selection(chosen, fields, names)
        yield {name: sample[old] for name, old in names}
    policy.finish()


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
            if origin:
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
    """Yield each sample as a new dictionary with the functions applied to their fields."""
    policy = ErrorPolicy(on_error, "map_dict")
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error("map_dict", sample)
        mapped = sample.copy()
        field = ""
        try:
            for field, function in functions.items():
                if field not in mapped:
                    _choose(sample, (field,))
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
    """Yield each sequence as a tuple with the functions applied by position; None leaves an element unchanged."""
    policy = ErrorPolicy(on_error, "map_tuple")
    for values in policy.counted(source):
        if isinstance(values, Mapping):
            raise TypeError("map_tuple needs tuples, but got a sample: put it after to_tuple, or use map_dict")
        mapped = list(values)
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


def warn_of_padding(stage: str) -> None:
    """Warn that a stage makes tuples that do not tell padding from data."""
    warn_user(
        f"{stage} leaves out {PADDING_MARK!r}, so samples that only fill up a batch of IndexedSamples count as data. "
        f'Select it as well, and give them no weight, or pass remainder="keep" to IndexedSamples'
    )


def not_a_sample_error(stage: str, item: object) -> TypeError:
    """Return the error for an item that is not a sample."""
    return TypeError(
        f"{stage} needs samples, which are dicts of fields, but got a {type(item).__name__}: "
        f"put it after group_samples, and before stages such as to_tuple"
    )


def _choose(sample: Sample, names: tuple[str, ...], missing: Missing = "raise") -> str:
    """Return the first of the given fields that a sample has."""
    for name in names:
        if name in sample:
            return name
    if missing == "none":
        return NO_FIELD
    fields = [name for name in sample if name[:2] != "__"]
    raise MissingFieldError(f"the field {';'.join(names)!r} was requested, but {describe_sample(sample)} has {fields}")


def cache_selection(chosen: dict[tuple[str, ...], T], fields: tuple[str, ...], names: T) -> None:
    """Cache a result for samples with these fields, up to a limit."""
    if len(chosen) > 1000:  # each sample has other fields
        chosen.clear()
    chosen[fields] = names


def describe_sample(sample: Sample) -> str:
    """Describe a sample for a message."""
    return f"the sample {sample.get('__key__')!r} of {redact(str(sample.get('__url__', 'an unknown shard')))}"
