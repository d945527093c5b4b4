"""The stage ``.rename()``: rename the fields of samples."""

from __future__ import annotations

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.select import parse_specs, rename
from wds_datapipes.types import Sample


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
            old names are dropped, and so is a field that had the new name.

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
