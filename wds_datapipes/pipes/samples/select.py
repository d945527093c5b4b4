"""Stages that select and rename fields by patterns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error, refuse_handler
from wds_datapipes.pipes.stage import EngineStage, OneToOneStage, register_stage
from wds_datapipes.samples.fields import Lacking, Missing
from wds_datapipes.samples.select import (
    Alternatives,
    extract_keys,
    parse_patterns,
    parse_rules,
    rename_keys,
    select_fields,
)
from wds_datapipes.types import Sample


@register_stage("select_fields")
class FieldSelector(EngineStage[Sample]):
    """Keep only the fields that match patterns (functional name: ``select_fields``).

    A shell pattern, case-insensitive, matches a field with or without a leading dot: ``"*.png"`` matches ``png`` and
    ``seg.png``. Names that start with two underscores, such as ``__key__``, are always kept. To select fields by name
    while reading, use ``group_samples(fields=...)``, which also skips samples without any of them.

    Yields:
        dict: a new one, with the matching fields, in the order of the sample.

    Args:
        source: yields samples.
        patterns: each argument must match a field; ``"jpg;png"``, or a list, lists alternatives.
        missing: what to do with a sample in which an argument matches no field: ``"raise"``; ``"keep"`` it with its
            other fields, even if it has none; or ``"skip"`` it, which is neither an error nor reported.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: one of the patterns matches no field of a sample.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "png": b"...", "cls": 3, "json": {}}])
        >>> list(samples.select_fields("jpg;png", "cls"))
        [{'__key__': 'a', 'png': b'...', 'cls': 3}]
    """

    is_stateless = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        *patterns: Alternatives,
        missing: Lacking = "raise",
        on_error: OnError = "raise",
    ) -> None:
        check_on_error(on_error)
        parse_patterns("select_fields", patterns)
        check_choice("missing", missing, Lacking)
        self.source = source
        self.patterns = patterns
        self.missing = missing
        self.on_error = on_error

    def __iter__(self) -> Iterator[Sample]:
        yield from select_fields(self.source, self.patterns, missing=self.missing, on_error=self.counted_errors)


@register_stage("extract_keys")
class KeyExtractor(OneToOneStage[tuple[Any, ...]]):
    """Turn samples into tuples of the fields that patterns match (functional name: ``extract_keys``).

    Patterns are those of `FieldSelector`, and also match ``"__key__"`` and ``"__padding__"``; it warns, as
    ``to_tuple`` does, if padding of `IndexedSamples` is not selected. webdataset's ``ignore_missing`` shortens the
    tuple, so that elements change their index; ``missing="none"`` yields None for a missing field instead.

    Yields:
        tuple: one value for each pattern.

    Args:
        source: yields samples.
        patterns: each must match one field; ``"jpg;png"``, or a list, lists alternatives.
        missing: what to do if a pattern matches no field: ``"raise"``, or yield ``None`` for it (``"none"``).
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a pattern matches no field.
        DuplicateKeyError: a pattern matches several.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "left.png": b"...", "cls": 3}])
        >>> list(samples.extract_keys("*.jpg;*.png", "cls"))
        [(b'...', 3)]
    """

    is_stateless = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        *patterns: Alternatives,
        missing: Missing = "raise",
        on_error: OnError = "raise",
    ) -> None:
        check_on_error(on_error)
        parse_patterns("extract_keys", patterns)
        check_choice("missing", missing, Missing)
        self.source = source
        self.patterns = patterns
        self.missing = missing
        self.on_error = on_error

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from extract_keys(self.source, self.patterns, missing=self.missing, on_error=self.counted_errors)


@register_stage("rename_keys")
class KeyRenamer(OneToOneStage[Sample]):
    """Rename the fields that match patterns (functional name: ``rename_keys``).

    Patterns are those of `FieldSelector`. If several rules match a field, the last one applies; keywords come after
    pairs. Names that start with two underscores, such as ``__key__``, are always kept.

    Yields:
        dict: the metadata, then the renamed fields, in the order of the sample.

    Args:
        source: yields samples.
        pairs: ``(new name, pattern)``, for new names that are not Python identifiers.
        keep_unselected: also keep the fields that no pattern matches.
        must_match: raise if a rule matches no field of a sample.
        duplicate_is_error: raise if two fields get the same name; otherwise the first one is used.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        new: the pattern for each new name.

    Raises:
        MissingFieldError: a rule matches no field.
        DuplicateKeyError: two fields get the same name.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "left.png": b"...", "cls": 3, "txt": "one"}])
        >>> list(samples.rename_keys(("image", "*.png"), label="cls"))
        [{'__key__': 'a', 'image': b'...', 'label': 3}]
    """

    is_stateless = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        /,
        *pairs: tuple[str, str],
        keep_unselected: bool = False,
        must_match: bool = True,
        duplicate_is_error: bool = True,
        on_error: OnError = "raise",
        **new: str,
    ) -> None:
        check_on_error(on_error)
        refuse_handler(new, 'keywords are new names, as in image="*.png"')
        parse_rules(pairs, new)
        self.source = source
        self.pairs = pairs
        self.keep_unselected = keep_unselected
        self.must_match = must_match
        self.duplicate_is_error = duplicate_is_error
        self.on_error = on_error
        self.new = new

    def __iter__(self) -> Iterator[Sample]:
        yield from rename_keys(
            self.source,
            parse_rules(self.pairs, self.new),
            keep_unselected=self.keep_unselected,
            must_match=self.must_match,
            duplicate_is_error=self.duplicate_is_error,
            on_error=self.counted_errors,
        )
