"""Stages that select and rename fields, by name or by patterns, and that add fields from a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.stage import FunctionStage, register_stage
from wds_datapipes.samples.fields import Entry, Lacking, Missing, associate
from wds_datapipes.samples.select import (
    Alternatives,
    extract_keys,
    parse_patterns,
    parse_rules,
    parse_specs,
    rename,
    rename_keys,
    select_fields,
    to_tuple,
)
from wds_datapipes.types import Sample


@register_stage("to_tuple")
class TupleMaker(FunctionStage[tuple[Any, ...]]):
    """Turn samples into tuples of selected fields (functional name: ``to_tuple``).

    It warns if a sample only pads a batch of `IndexedSamples` and ``"__padding__"`` is not among the fields.

    Yields:
        tuple: one value for each spec.

    Args:
        source: yields samples.
        specs: names of fields, including ``__key__`` and ``__url__``; ``"jpg;png"`` selects the first existing field,
            and ``"jpg;png cls"`` is short for ``"jpg;png", "cls"``.
        missing: what to do if none of the alternatives exists: ``"raise"``, or use ``None`` as the value (``"none"``).
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a sample has none of the alternatives.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "png": b"...", "cls": 3}]).to_tuple("jpg;png", "cls"))
        [(b'...', 3)]
    """

    is_one_to_one = True
    function = staticmethod(to_tuple)

    def __init__(
        self, source: IterDataPipe[Sample], *specs: str, missing: Missing = "raise", on_error: OnError = "raise"
    ) -> None:
        parse_specs(specs)
        check_choice("missing", missing, Missing)
        super().__init__(source, specs=specs, missing=missing, on_error=on_error)

    @property
    def specs(self) -> tuple[str, ...]:
        """The specs of the elements."""
        specs: tuple[str, ...] = self._options.value["specs"]
        return specs


@register_stage("rename")
class FieldRenamer(FunctionStage[Sample]):
    """Rename fields (functional name: ``rename``).

    Yields:
        dict: a new dict with the other fields, followed by the renamed ones. ``__key__`` and ``__url__`` are always
            kept.

    Args:
        source: yields samples.
        keep: also keep the other fields.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        new: one or more old names for each new name: ``image="jpg;png"`` renames the first field that exists. The other
            old names are dropped.

    Raises:
        MissingFieldError: a sample has none of the old names.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "png": b"...", "cls": 3}]).rename(image="jpg;png"))
        [{'__key__': 'a', 'cls': 3, 'image': b'...'}]
    """

    is_one_to_one = True
    function = staticmethod(rename)

    def __init__(
        self, source: IterDataPipe[Sample], /, *, keep: bool = True, on_error: OnError = "raise", **new: str
    ) -> None:
        refuse_handler(new, 'keywords are new names, as in image="jpg;png"')
        for name, old in new.items():
            if len(parse_specs([old])) != 1:
                raise ValueError(f'rename takes one field for each new name, as in {name}="jpg;png", not {old!r}')
        super().__init__(source, new=new, keep=keep, on_error=on_error)


@register_stage("select_fields")
class FieldSelector(FunctionStage[Sample]):
    """Keep only the fields that match patterns (functional name: ``select_fields``).

    Patterns are case-insensitive shell patterns, and match a field with or without a leading dot: ``"*.png"`` matches
    ``png`` and ``seg.png``. Names that start with two underscores, such as ``__key__``, are always kept. To select
    fields by name while reading, use ``group_samples(fields=...)``, which also skips samples without any of them.

    Yields:
        dict: a new dict with the matching fields, in the order of the sample.

    Args:
        source: yields samples.
        patterns: each argument must match a field; ``"jpg;png"`` or a list gives alternatives.
        missing: what to do with a sample in which an argument matches no field: ``"raise"`` an error, ``"keep"`` it
            with its other fields, even if it has none, or silently ``"skip"`` it.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: one of the patterns matches no field of a sample.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "png": b"...", "cls": 3, "json": {}}])
        >>> list(samples.select_fields("jpg;png", "cls"))
        [{'__key__': 'a', 'png': b'...', 'cls': 3}]
    """

    function = staticmethod(select_fields)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        *patterns: Alternatives,
        missing: Lacking = "raise",
        on_error: OnError = "raise",
    ) -> None:
        parse_patterns("select_fields", patterns)
        check_choice("missing", missing, Lacking)
        super().__init__(source, patterns=patterns, missing=missing, on_error=on_error)


@register_stage("extract_keys")
class KeyExtractor(FunctionStage[tuple[Any, ...]]):
    """Turn samples into tuples of the fields that patterns match (functional name: ``extract_keys``).

    Patterns are those of `FieldSelector`, but also match ``"__key__"`` and ``"__padding__"``. Like ``to_tuple``, this
    stage warns if padding of `IndexedSamples` is not selected. webdataset's ``ignore_missing`` shortens the tuple,
    which changes the index of later elements; ``missing="none"`` yields None for a missing field instead.

    Yields:
        tuple: one value for each pattern.

    Args:
        source: yields samples.
        patterns: each must match exactly one field; ``"jpg;png"`` or a list gives alternatives.
        missing: what to do if a pattern matches no field: ``"raise"``, or yield ``None`` for it (``"none"``).
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a pattern matches no field.
        DuplicateKeyError: a pattern matches several fields.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "left.png": b"...", "cls": 3}])
        >>> list(samples.extract_keys("*.jpg;*.png", "cls"))
        [(b'...', 3)]
    """

    is_one_to_one = True
    function = staticmethod(extract_keys)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        *patterns: Alternatives,
        missing: Missing = "raise",
        on_error: OnError = "raise",
    ) -> None:
        parse_patterns("extract_keys", patterns)
        check_choice("missing", missing, Missing)
        super().__init__(source, patterns=patterns, missing=missing, on_error=on_error)


@register_stage("rename_keys")
class KeyRenamer(FunctionStage[Sample]):
    """Rename the fields that match patterns (functional name: ``rename_keys``).

    Patterns are those of `FieldSelector`. If several rules match a field, the last one applies; keywords come after
    pairs. Names that start with two underscores, such as ``__key__``, are always kept.

    Yields:
        dict: the metadata, followed by the renamed fields in the order of the sample.

    Args:
        source: yields samples.
        pairs: ``(new name, pattern)``, for new names that are not Python identifiers.
        keep_unselected: also keep the fields that no pattern matches.
        must_match: raise an error if a rule matches no field of a sample.
        duplicate_is_error: raise an error if two fields get the same name; otherwise, the first one is used.
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

    is_one_to_one = True
    function = staticmethod(rename_keys)

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
        refuse_handler(new, 'keywords are new names, as in image="*.png"')
        parse_rules(pairs, new)
        super().__init__(
            source,
            pairs=pairs,
            new=new,
            keep_unselected=keep_unselected,
            must_match=must_match,
            duplicate_is_error=duplicate_is_error,
            on_error=on_error,
        )


@register_stage("associate")
class Associator(FunctionStage[Sample]):
    """Add fields from a table, looked up by a sample's key or shard (functional name: ``associate``).

    Added fields replace fields with the same name, except ``__key__``, ``__url__``, ``__local_path__`` and
    ``__padding__``.

    Yields:
        dict: a new dict with the fields of the sample and those from the table.

    Args:
        source: yields samples.
        table: a mapping from ``__key__`` to a dict of fields, or a function of the key that returns such a dict or
            None. Each worker process has a copy of the table; if it is large, use a function that queries a file or a
            database.
        by: the field to look up instead of ``__key__``, such as ``"__url__"`` for metadata of whole shards.
        missing: what to do with a sample without an entry: ``"raise"`` an error, ``"keep"`` it unchanged, or silently
            ``"skip"`` it.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a sample has no entry in the table.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "png": b"..."}])
        >>> list(samples.associate({"a": {"label": 3}}))
        [{'__key__': 'a', 'png': b'...', 'label': 3}]
    """

    draws_globally = True
    function = staticmethod(associate)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        table: Mapping[Any, Mapping[str, Any]] | Callable[[Any], Entry],
        *,
        by: str = "__key__",
        missing: Lacking = "raise",
        on_error: OnError = "raise",
    ) -> None:
        check_choice("missing", missing, Lacking)
        if not isinstance(table, Mapping) and not callable(table):
            raise TypeError(f"associate takes a mapping from keys to fields, or a function of a key, not {table!r}")
        super().__init__(source, table=table, by=by, missing=missing, on_error=on_error)
