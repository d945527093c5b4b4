"""The stage ``.map_dict()``: apply functions to fields by name."""

from __future__ import annotations

from wds_datapipes.arguments import check_callable
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Function, map_dict
from wds_datapipes.types import Sample


class DictMapper(FunctionStage[Sample]):
    """Apply functions to fields by name (functional name: ``map_dict``).

    Yields:
        dict: a new dict for each sample; the sample itself is unchanged.

    Args:
        source: yields samples.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        by_field: the function to apply to each field.

    Raises:
        MissingFieldError: a sample lacks one of the fields.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "txt": "Hello"}]).map_dict(txt=str.upper))
        [{'__key__': 'a', 'txt': 'HELLO'}]
    """

    is_one_to_one = True
    draws_globally = True
    function = staticmethod(map_dict)

    def __init__(self, source: IterDataPipe[Sample], /, *, on_error: OnError = "raise", **by_field: Function) -> None:
        refuse_handler(by_field, "keywords are fields. For a field of that name, use map_samples")
        if not by_field:
            raise ValueError("map_dict needs a function for at least one field, as in map_dict(txt=str.upper)")
        for field, function in by_field.items():
            check_callable(f"map_dict applies a function to the field {field!r}", function)
        super().__init__(source, functions=by_field, on_error=on_error)
