"""Selecting and renaming the fields of samples by patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.errors import DuplicateKeyError, MissingFieldError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.samples.fields import (
    NO_FIELD,
    PADDING_MARK,
    Lacking,
    Missing,
    cache_selection,
    describe_sample,
    not_a_sample_error,
    warn_of_padding,
)
from wds_datapipes.types import Sample

T = TypeVar("T")

Alternatives: TypeAlias = "str | Sequence[str]"
"""Patterns, at least one of which must match: ``"jpg;png"``, or a list of them."""


class _Pattern:
    """Shell patterns that match a field in lower case, with or without a dot before it.

    Only patterns that begin with two underscores match metadata, so ``*`` means all fields.
    """

    def __init__(self, alternatives: Sequence[str]) -> None:
        self.text = ";".join(alternatives)
        both = [[pattern for pattern in alternatives if (pattern[:2] == "__") is meta] for meta in (False, True)]
        self._matches, self._meta_matches = ([re.compile(translate(p.lower())).match for p in part] for part in both)

    def __call__(self, field: str) -> bool:
        name = field.lower()
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
    texts = [pattern.text.lower() for _, pattern in rules]
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(
                f"rename_keys has the pattern {text!r} twice, but only the last rule would apply: pass it once"
            )
    return rules


def rename_keys(
    source: Iterable[Sample],
    rules: Sequence[tuple[str, _Pattern]],
    *,
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with the fields that match patterns under new names; the last match wins."""

    def find(sample: Sample) -> list[tuple[str, str]]:
        found: dict[str, str] = {}
        unmatched = dict(enumerate(rules))
        for field in sample:
            number = next((number for number in reversed(range(len(rules))) if rules[number][1](field)), None)
            if number is None:
                if not keep_unselected or field[:2] == "__":
                    continue
                name = field
            else:
                name = rules[number][0]
                unmatched.pop(number, None)
            if name not in found:
                found[name] = field
            elif duplicate_is_error:
                raise DuplicateKeyError(
                    f"rename_keys would rename both {found[name]!r} and {field!r} of {describe_sample(sample)} to "
                    f"{name!r}. Make the patterns more specific, or pass duplicate_is_error=False to use the first"
                )
        if must_match and unmatched:
            name, pattern = next(iter(unmatched.values()))
            raise _missing_error("rename_keys", pattern, sample, f" to rename to {name!r}")
        return [*{**{name: name for name in sample if name[:2] == "__"}, **found}.items()]

    for sample, names in _select_fields("rename_keys", source, find, on_error):
        yield {name: sample[field] for name, field in names}


def extract_keys(
    source: Iterable[Sample],
    patterns: Sequence[Alternatives],
    *,
    missing: Missing = "raise",
    on_error: OnError = "raise",
) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple of the fields that match patterns, one for each pattern."""
    parsed = parse_patterns("extract_keys", patterns)

    def find(sample: Sample) -> list[str]:
        names = []
        for pattern in parsed:
            matching = [field for field in sample if pattern(field)]
            if len(matching) > 1:
                raise DuplicateKeyError(
                    f"extract_keys needs one field for each pattern, but {pattern.text!r} matches {matching} of "
                    f"{describe_sample(sample)}. Make it more specific, or use to_tuple, which selects the first"
                )
            if not matching and missing == "raise":
                raise _missing_error("extract_keys", pattern, sample)
            names.append(matching[0] if matching else NO_FIELD)
        return names

    has_warned = False
    for sample, names in _select_fields("extract_keys", source, find, on_error):
        if sample.get(PADDING_MARK) and PADDING_MARK not in names and not has_warned:
            warn_of_padding("extract_keys")
            has_warned = True
        yield tuple(map(sample.get, names))


def select_fields(
    source: Iterable[Sample],
    patterns: Sequence[Alternatives],
    *,
    missing: Lacking = "raise",
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with only its metadata and the fields that match patterns."""
    parsed = parse_patterns("select_fields", patterns)

    def find(sample: Sample) -> list[str] | None:
        for pattern in parsed if missing != "keep" else ():
            if not any(map(pattern, sample)):
                if missing == "skip":
                    return None
                raise _missing_error("select_fields", pattern, sample)
        return [field for field in sample if field[:2] == "__" or any(pattern(field) for pattern in parsed)]

    for sample, names in _select_fields("select_fields", source, find, on_error):
        if names is not None:
            yield {name: sample[name] for name in names}


def _select_fields(
    stage: str, source: Iterable[Sample], find: Callable[[Sample], T], on_error: OnError
) -> Iterator[tuple[Sample, T]]:
    """Yield the selection of each sample; it is computed once for samples with the same fields."""
    policy = ErrorPolicy(on_error, stage)
    chosen: dict[tuple[str, ...], T] = {}
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error(stage, sample)
        fields = tuple(sample)
        if fields not in chosen:
            try:
                names = find(sample)
            except (DuplicateKeyError, MissingFieldError) as error:
                if policy.handle(error, sample):
                    continue
                break
            cache_selection(chosen, fields, names)
        yield sample, chosen[fields]
    policy.finish()


def _missing_error(stage: str, pattern: _Pattern, sample: Sample, what: str = "") -> MissingFieldError:
    fields = [name for name in sample if name[:2] != "__"]
    return MissingFieldError(
        f"{stage} needs a field that matches {pattern.text!r}{what}, but {describe_sample(sample)} has {fields}"
    )
