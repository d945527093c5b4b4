"""The stage ``.associate()``: add fields from a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Entry, Lacking, associate
from wds_datapipes.types import Sample


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
