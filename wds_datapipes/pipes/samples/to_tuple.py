"""The stage ``.to_tuple()``: turn samples into tuples of fields."""

from __future__ import annotations

from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Missing
from wds_datapipes.samples.select import parse_specs, to_tuple
from wds_datapipes.types import Sample


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
