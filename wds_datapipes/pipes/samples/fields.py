"""Stages that select, rename and map fields by name, and map whole samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error, refuse_handler
from wds_datapipes.pipes.stage import EngineStage, OneToOneStage, OpaqueValue, register_stage
from wds_datapipes.samples.fields import Function, Missing, map_dict, map_samples, map_tuple
from wds_datapipes.samples.select import parse_specs, rename, to_tuple
from wds_datapipes.types import Sample


@register_stage("to_tuple")
class TupleMaker(OneToOneStage[tuple[Any, ...]]):
    """Turn samples into tuples of selected fields (functional name: ``to_tuple``).

    It warns if a sample only fills up a batch of `IndexedSamples`, and ``"__padding__"`` is not among the fields.

    Yields:
        tuple: one value for each spec.

    Args:
        source: yields samples.
        specs: names of fields, ``__key__`` and ``__url__`` included; ``"jpg;png"`` selects the first existing field,
            and ``"jpg;png cls"`` means the same as ``"jpg;png", "cls"``.
        missing: what to do if none of the alternatives exists: ``"raise"``, or use ``None`` as the value (``"none"``).
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a sample has none of the alternatives.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "png": b"...", "cls": 3}]).to_tuple("jpg;png", "cls"))
        [(b'...', 3)]
    """

    is_stateless = True

    def __init__(
        self, source: IterDataPipe[Sample], *specs: str, missing: Missing = "raise", on_error: OnError = "raise"
    ) -> None:
        check_on_error(on_error)
        parse_specs(specs)
        check_choice("missing", missing, Missing)
        self.source = source
        self.specs = specs
        self.missing = missing
        self.on_error = on_error

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from to_tuple(self.source, self.specs, missing=self.missing, on_error=self.counted_errors)


@register_stage("rename")
class FieldRenamer(OneToOneStage[Sample]):
    """Rename fields (functional name: ``rename``).

    Yields:
        dict: the other fields, then the renamed ones. ``__key__`` and ``__url__`` are always kept.

    Args:
        source: yields samples.
        keep: also keep the other fields.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        new: maps each new name to one or more old names: ``image="jpg;png"`` renames the first that exists. The other
            old names are dropped.

    Raises:
        MissingFieldError: a sample has none of the old names.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "png": b"...", "cls": 3}]).rename(image="jpg;png"))
        [{'__key__': 'a', 'cls': 3, 'image': b'...'}]
    """

    is_stateless = True

    def __init__(
        self, source: IterDataPipe[Sample], /, *, keep: bool = True, on_error: OnError = "raise", **new: str
    ) -> None:
        check_on_error(on_error)
        refuse_handler(new, 'keywords are new names, as in image="jpg;png"')
        for name, old in new.items():
            if len(parse_specs([old])) != 1:
                raise ValueError(f'rename takes one field for each new name, as in {name}="jpg;png", not {old!r}')
        self.source = source
        self.keep = keep
        self.on_error = on_error
        self.new = new

    def __iter__(self) -> Iterator[Sample]:
        yield from rename(self.source, self.new, keep=self.keep, on_error=self.counted_errors)


@register_stage("map_samples")
class SampleMapper(EngineStage[Any]):
    """Apply a function to whole samples (functional name: ``map_samples``).

    It differs from torch's ``.map()`` in three points: a sample is skipped if the function returns None; an error names
    the sample's key and shard, and can be skipped by ``on_error``; and if the function takes a sample and returns a
    dict, the dict keeps the sample's ``__key__``, ``__url__``, ``__local_path__`` and ``__padding__``, unless it sets
    its own.

    Yields:
        Any: the results of the function.

    Args:
        source: yields samples, or anything else.
        function: called with each item.
        on_error: ``"raise"``, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler; all but the first skip the
            item.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": 3}, {"__key__": "b", "cls": 4}])
        >>> list(samples.map_samples(lambda sample: {"odd": True} if sample["cls"] % 2 else None))
        [{'__key__': 'a', 'odd': True}]
    """

    is_stateless = True
    draws_globally = True

    def __init__(self, source: IterDataPipe[Any], function: Function, *, on_error: OnError = "raise") -> None:
        check_on_error(on_error)
        if not callable(function):
            raise TypeError(f"map_samples applies a function to each sample, not {function!r}")
        self.source = source
        self.on_error = on_error
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        yield from map_samples(self.source, self._function, on_error=self.counted_errors)


@register_stage("map_dict")
class DictMapper(OneToOneStage[Sample]):
    """Apply functions to fields by name (functional name: ``map_dict``).

    Yields:
        dict: a new one for each sample; the sample itself is unchanged.

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

    is_stateless = True
    draws_globally = True

    def __init__(self, source: IterDataPipe[Sample], /, *, on_error: OnError = "raise", **by_field: Function) -> None:
        check_on_error(on_error)
        refuse_handler(by_field, "keywords are fields. For a field of that name, use map_samples")
        if not by_field:
            raise ValueError("map_dict needs a function for at least one field, as in map_dict(txt=str.upper)")
        for field, function in by_field.items():
            if not callable(function):
                raise TypeError(f"map_dict applies a function to the field {field!r}, not {function!r}")
        self.source = source
        self.on_error = on_error
        self._by_field = OpaqueValue(by_field)

    def __iter__(self) -> Iterator[Sample]:
        yield from map_dict(self.source, self._by_field.value, on_error=self.counted_errors)


@register_stage("map_tuple")
class TupleMapper(OneToOneStage[tuple[Any, ...]]):
    """Apply functions to the elements of tuples by position (functional name: ``map_tuple``).

    Yields:
        tuple: a new one for each tuple or list.

    Args:
        source: yields tuples or lists.
        by_position: one function for each element, from the first; ``None`` leaves the element unchanged.
        on_error: ``"raise"``; or, to skip the tuple, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        ValueError: there are more functions than elements.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([("a", 1)]).map_tuple(str.upper, None))
        [('A', 1)]
    """

    is_stateless = True
    draws_globally = True

    def __init__(
        self, source: IterDataPipe[Sequence[Any]], *by_position: Function | None, on_error: OnError = "raise"
    ) -> None:
        check_on_error(on_error)
        for function in by_position:
            if function is not None and not callable(function):
                raise TypeError(f"map_tuple applies functions, or None to leave an element unchanged, not {function!r}")
        self.source = source
        self._by_position = OpaqueValue(by_position)
        self.on_error = on_error

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from map_tuple(self.source, self._by_position.value, on_error=self.counted_errors)
