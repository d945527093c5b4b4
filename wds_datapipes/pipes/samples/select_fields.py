"""The stage ``.select_fields()``: keep some fields of samples."""

from __future__ import annotations

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Lacking
from wds_datapipes.samples.select import Alternatives, parse_patterns, select_fields
from wds_datapipes.types import Sample


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
