"""Select and rename the fields of samples, by name or by pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.errors import DuplicateKeyError, MissingFieldError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.samples.fields import (
    PADDING_MARK,
    Lacking,
    Missing,
    describe_sample,
    missing_field_error,
    not_a_sample_error,
)
from wds_datapipes.types import Sample
from wds_datapipes.user_warnings import warn_user

T = TypeVar("T")

Alternatives: TypeAlias = "str | Sequence[str]"
"""Patterns, at least one of which must match: ``"jpg;png"``, or a list of them."""

#: A name that no field has, for which a sample's ``get`` returns None.
NO_FIELD = "\0"


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


class _Pattern:
    """Shell patterns that match a field in lower case, with or without a leading dot.

    Only patterns that begin with two underscores match metadata, so ``*`` means all fields.
    """

    def __init__(self, alternatives: Sequence[str]) -> None:
        self.text = ";".join(alternatives)
        both = [[pattern for pattern in alternatives if (pattern[:2] == "__") is meta] for meta in (False, True)]
        self._matches, self._meta_matches = ([re.compile(translate(p.lower())).match for p in part] for part in both)

    def __call__(self, field: str) -> bool:
        name = str(field).lower()  # users' functions may return other names
        if name[:2] == "__":
            return any(match(name) for match in self._meta_matches)
        return any(match(name) or match(f".{name}") for match in self._matches)


def parse_patterns(stage: str, patterns: Sequence[Alternatives]) -> list[_Pattern]:
    """Split patterns into their alternatives.

    >>> [pattern.text for pattern in parse_patterns("extract_keys", ["*.jpg;*.png", ["cls", "txt"]])]
    ['*.jpg;*.png', 'cls;txt']
    """
    parsed = []
    for given in patterns:
        texts: Any = given.split(";") if isinstance(given, str) else given
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f'{stage} needs patterns such as "*.jpg;*.png", "cls", or lists of them, not {given!r}')
        texts = [text.strip() for text in texts if text.strip()]
        if not texts:
            raise ValueError(f"{stage} got {given!r}, which matches no field")
        parsed.append(_Pattern(texts))
    if not parsed:
        raise ValueError(f'{stage} needs at least one pattern, as in {stage}("*.jpg;*.png", "cls")')
    return parsed


def parse_rules(pairs: Sequence[tuple[str, str]], new: Mapping[str, str]) -> list[tuple[str, _Pattern]]:
    """Parse rules of ``rename_keys`` into new names and patterns."""
    rules = []
    pair: Any
    for pair in [*pairs, *new.items()]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TypeError(
                f'rename_keys needs pairs of a new name and a pattern, such as ("image", "*.jpg"), not {pair!r}'
            )
        rules.append((pair[0], _Pattern([pair[1]])))
    if not rules:
        raise ValueError('rename_keys needs a new name and a pattern, as in rename_keys(("image", "*.jpg"))')
    return rules


def to_tuple(
    source: Iterable[Sample], specs: Sequence[str], *, missing: Missing = "raise", on_error: OnError = "raise"
) -> Iterator[tuple[Any, ...]]:
    """Yield the named fields of each sample as a tuple."""
    parsed = parse_specs(specs)

    def find(sample: Sample) -> Callable[[Sample], tuple[Any, ...]]:
        return _tuple_maker("to_tuple", sample, [_choose(sample, names, missing) for names in parsed])

    return _select("to_tuple", source, find, on_error)


def rename(
    source: Iterable[Sample], new: Mapping[str, str], *, keep: bool = True, on_error: OnError = "raise"
) -> Iterator[Sample]:
    """Yield each sample with its fields under new names."""
    alternatives = list(zip(new, parse_specs(list(new.values())), strict=True))
    taken = frozenset(name for _, names in alternatives for name in names)

    def find(sample: Sample) -> Callable[[Sample], Sample]:
        kept = {name: name for name in sample if name[:2] == "__" or (keep and name not in taken)}
        return _dict_maker({**kept, **{name: _choose(sample, names) for name, names in alternatives}})

    return _select("rename", source, find, on_error)


def rename_keys(
    source: Iterable[Sample],
    pairs: Sequence[tuple[str, str]],
    new: Mapping[str, str],
    *,
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with the fields that match patterns under new names; the last match wins."""
    rules = parse_rules(pairs, new)

    def find(sample: Sample) -> Callable[[Sample], Sample]:
        found: dict[str, str] = {}
        unmatched = dict(enumerate(rules))
        for field in sample:
            number = next((number for number in reversed(range(len(rules))) if rules[number][1](field)), None)
            if number is None and (not keep_unselected or field[:2] == "__"):
                continue
            name = field if number is None else rules[number][0]
            unmatched.pop(-1 if number is None else number, None)
            if name not in found:
                found[name] = field
            elif duplicate_is_error:
                raise DuplicateKeyError(
                    f"rename_keys would rename both {found[name]!r} and {field!r} of {describe_sample(sample)} to "
                    f"{name!r}. Make the patterns more specific, or pass duplicate_is_error=False to use the first"
                )
        if must_match and unmatched:
            name, pattern = next(iter(unmatched.values()))
            what = f"rename_keys needs a field that matches {pattern.text!r} to rename to {name!r}"
            raise missing_field_error(what, sample)
        return _dict_maker({**{name: name for name in sample if name[:2] == "__"}, **found})

    return _select("rename_keys", source, find, on_error)


def extract_keys(
    source: Iterable[Sample],
    patterns: Sequence[Alternatives],
    *,
    missing: Missing = "raise",
    on_error: OnError = "raise",
) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple of the fields that match patterns, one for each pattern."""
    parsed = parse_patterns("extract_keys", patterns)

    def find(sample: Sample) -> Callable[[Sample], tuple[Any, ...]]:
        names = []
        for pattern in parsed:
            matching = [field for field in sample if pattern(field)]
            if len(matching) > 1:
                raise DuplicateKeyError(
                    f"extract_keys needs one field for each pattern, but {pattern.text!r} matches {matching} of "
                    f"{describe_sample(sample)}. Make it more specific, or use to_tuple, which selects the first"
                )
            if not matching and missing == "raise":
                raise missing_field_error(f"extract_keys needs a field that matches {pattern.text!r}", sample)
            names.append(matching[0] if matching else NO_FIELD)
        return _tuple_maker("extract_keys", sample, names)

    return _select("extract_keys", source, find, on_error)


def select_fields(
    source: Iterable[Sample],
    patterns: Sequence[Alternatives],
    *,
    missing: Lacking = "raise",
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with only its metadata and the fields that match patterns."""
    parsed = parse_patterns("select_fields", patterns)

    def find(sample: Sample) -> Callable[[Sample], Sample | None]:
        for pattern in parsed if missing != "keep" else ():
            if not any(map(pattern, sample)):
                if missing == "skip":
                    return lambda _: None
                raise missing_field_error(f"select_fields needs a field that matches {pattern.text!r}", sample)
        return _dict_maker(
            {name: name for name in sample if name[:2] == "__" or any(pattern(name) for pattern in parsed)}
        )

    return _select("select_fields", source, find, on_error)


def _select(
    stage: str, source: Iterable[Sample], find: Callable[[Sample], Callable[[Sample], T | None]], on_error: OnError
) -> Iterator[T]:
    """Yield the results of a function of each sample, except None; ``find`` returns the function for a set of fields.

    It is called once for each set of fields, because samples usually share a few sets.
    """
    policy = ErrorPolicy(on_error, stage)
    makers: dict[tuple[str, ...], Callable[[Sample], T | None]] = {}
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error(stage, sample)
        make = makers.get(fields := tuple(sample))
        if make is None:
            try:
                make = find(sample)
            except (DuplicateKeyError, MissingFieldError) as error:
                if policy.handle(error, sample):
                    continue
                break
            if len(makers) > 1000:  # each sample has different fields
                makers.clear()
            makers[fields] = make
        if (made := make(sample)) is not None:
            yield made
    policy.finish()


def _tuple_maker(stage: str, sample: Sample, names: list[str]) -> Callable[[Sample], tuple[Any, ...]]:
    """Return a function that makes a tuple of the named fields, and warns if it drops the mark of padding."""
    if PADDING_MARK not in sample or PADDING_MARK in names:
        return lambda sample: tuple(map(sample.get, names))

    has_warned = False

    def make(sample: Sample) -> tuple[Any, ...]:
        nonlocal has_warned
        if sample[PADDING_MARK] and not has_warned:
            has_warned = True
            warn_user(
                f"{stage} leaves out {PADDING_MARK!r}, so samples that only pad a batch of IndexedSamples count as "
                'data. Select it as well, and give them no weight, or pass remainder="keep" to IndexedSamples'
            )
        return tuple(map(sample.get, names))

    return make


def _dict_maker(names: Mapping[str, str]) -> Callable[[Sample], Sample]:
    """Return a function that makes a sample from fields, given a mapping from their new names to their old names."""
    pairs = [*names.items()]
    return lambda sample: {name: sample[old] for name, old in pairs}


def _choose(sample: Sample, names: tuple[str, ...], missing: Missing = "raise") -> str:
    """Return the first of the given fields that a sample has."""
    found = next((name for name in names if name in sample), NO_FIELD if missing == "none" else None)
    if found is None:
        advice = '. If samples have it under different names, name them all, as in "jpg;png;webp"'
        raise missing_field_error(f"the field {';'.join(names)!r} was requested", sample, advice)
    return found
