"""The stage ``.rename_keys()``: rename the fields of samples by patterns."""

from __future__ import annotations

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.select import parse_rules, rename_keys
from wds_datapipes.types import Sample


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
