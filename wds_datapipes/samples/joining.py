"""Join samples with a table: add fields by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from wds_datapipes.errors import MissingFieldError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.fields import (
    ORIGIN,
    Lacking,
    WrongItemError,
    describe_sample,
    map_samples,
    not_a_sample_error,
)
from wds_datapipes.types import Sample

Entry: TypeAlias = Mapping[str, Any] | None


def associate(
    source: Iterable[Sample],
    table: Mapping[Any, Mapping[str, Any]] | Callable[[Any], Entry],
    *,
    by: str = "__key__",
    missing: Lacking = "raise",
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with additional fields, which are looked up by its key or by another field."""
    find: Callable[[Any], Entry] = table.get if isinstance(table, Mapping) else table

    def join(sample: Sample) -> Sample | None:
        if not isinstance(sample, dict):
            raise not_a_sample_error("associate", sample)
        if by not in sample:
            raise MissingFieldError(f"associate looks up samples by the field {by!r}, but one has only {list(sample)}")
        entry = find(sample[by])
        if entry is None:
            if missing == "raise":
                raise MissingFieldError(
                    f"associate found no entry for {describe_sample(sample)}. "
                    f'Pass missing="keep" to yield such samples unchanged, or missing="skip" to drop them'
                )
            return sample.copy() if missing == "keep" else None
        if not isinstance(entry, Mapping):
            raise WrongItemError(
                f"associate needs dicts of fields, but found a {type(entry).__name__} for {describe_sample(sample)}: "
                f'make it a dict, as in {{"label": {entry!r:.40}}}'
            )
        return {**sample, **entry, **{name: sample[name] for name in ORIGIN if name in sample}}

    return map_samples(source, join, on_error=on_error, stage="associate")
