"""Choosing and renaming the fields of samples by patterns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.on_error.policy import OnError, check_on_error, refuse_handler
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.samples.fields import Missing
from wds_datapipes.samples.select import (
    Alternatives,
    Lacking,
    extract_keys,
    parse_patterns,
    parse_rules,
    rename_keys,
    select_fields,
)
from wds_datapipes.types import Sample

__all__ = ["FieldSelector", "KeyExtractor", "KeyRenamer"]


@register_stage("select_fields")
class FieldSelector(Stage[Sample]):
    """Keep only some fields (functional name: ``select_fields``).

    A field is named by a shell pattern, without regard to case, which matches the field or the field with a dot before
    it: ``"*.png"`` matches ``png`` and ``seg.png``. What begins with two underscores, such as ``__key__``, always
    stays. ``group_samples(fields=...)`` does the same earlier, by whole names, and leaves out samples without any.

    Yields:
        dict: a new one, with the fields that any of the patterns matches, in the order of the sample.

    Args:
        source: yields samples.
        patterns: ``"jpg;png"``, or a list, means one of these; each of the arguments has to match a field.
        missing: what to do with a sample in which one of them matches nothing: ``"raise"``; hand it on with what it has
            (``"keep"``), even if that is its key alone; or leave it out, which is no error and is not reported
            (``"skip"``).
        on_error: ``"raise"``; or, to pass over the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

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
        super().__init__()
        check_on_error(on_error)
        parse_patterns("select_fields", patterns)
        if missing not in ("raise", "keep", "skip"):
            raise ValueError(f'missing is "raise", "keep" or "skip", not {missing!r}')
        self.source = source
        self.patterns = patterns
        self.missing = missing
        self.on_error = on_error

    def __iter__(self) -> Iterator[Sample]:
        yield from select_fields(self.source, self.patterns, missing=self.missing, on_error=self.on_error)


@register_stage("extract_keys")
class KeyExtractor(Stage[tuple[Any, ...]]):
    """Turn samples into tuples of the fields that patterns match (functional name: ``extract_keys``).

    Patterns are those of `FieldSelector`; ``"__key__"`` may be asked for too. Where webdataset's ``ignore_missing``
    makes the tuple shorter, so that its elements change their places, this has None in the place of what is not there.

    Yields:
        tuple: one value for each pattern.

    Args:
        source: yields samples.
        patterns: each has to match one field; ``"jpg;png"``, or a list, means one of these.
        missing: what to do when a pattern matches nothing: ``"raise"``, or put ``None`` in its place (``"none"``).
        on_error: ``"raise"``; or, to pass over the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a pattern matches no field.
        DuplicateFieldError: a pattern matches several.

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
        super().__init__()
        check_on_error(on_error)
        parse_patterns("extract_keys", patterns)
        if missing not in ("raise", "none"):
            raise ValueError(f'missing is "raise" or "none", not {missing!r}')
        self.source = source
        self.patterns = patterns
        self.missing = missing
        self.on_error = on_error

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from extract_keys(self.source, self.patterns, missing=self.missing, on_error=self.on_error)


@register_stage("rename_keys")
class KeyRenamer(Stage[Sample]):
    """Give the fields that patterns match new names (functional name: ``rename_keys``).

    Patterns are those of `FieldSelector`. Where several rules match a field, the last one counts; those of keywords
    stand behind the pairs. What begins with two underscores, such as ``__key__``, always stays.

    Yields:
        dict: the meta data, then the renamed fields, in the order of the sample.

    Args:
        source: yields samples.
        pairs: ``(new name, pattern)``, for new names that are no Python names.
        keep_unselected: also keep the fields that no pattern matches.
        must_match: it is an error if a rule applies to no field of a sample.
        duplicate_is_error: it is an error if two fields would have one name; else the first of them is taken.
        on_error: ``"raise"``; or, to pass over the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        new: the new name, and the pattern.

    Raises:
        MissingFieldError: a rule applies to no field.
        DuplicateFieldError: two fields would have one name.

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
        super().__init__()
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
            on_error=self.on_error,
        )
