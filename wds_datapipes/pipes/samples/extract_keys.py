"""The stage ``.extract_keys()``: turn samples into tuples of fields by patterns."""

from __future__ import annotations

from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Missing
from wds_datapipes.samples.select import Alternatives, extract_keys, parse_patterns
from wds_datapipes.types import Sample


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
