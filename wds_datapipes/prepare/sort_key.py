"""Sort keys of samples: their keys, fields, and values inside JSON fields."""

from __future__ import annotations

import json
import math
from typing import Any, Literal, TypeAlias

from wds_datapipes.errors import DecodeError, MissingFieldError
from wds_datapipes.io.openers import redact
from wds_datapipes.types import Sample

WithoutValue: TypeAlias = Literal["raise", "first", "last"]
"""How to sort samples without a value: raise an error, or put them first or last."""

#: The most characters of a value that an error shows.
SHOWN = 60


class FieldSortKey:
    """Extracts the sort key of a sample: its key, a field, or a value inside a JSON field.

    Text is compared by code points. JSON numbers are compared as numbers; with ``numeric``, text is, too.

    Args:
        by: ``"key"``; the name of a field; or a field and a path into its JSON, as in ``"json/size/width"`` or
            ``"json/captions/0"``. ``".key"`` is the field of that name.
        numeric: parse text as numbers.
        missing: how to sort samples without the field, or with null or nothing at the path in its JSON.
        reverse: sort in descending order; this does not affect ``missing``.

    Raises:
        ValueError: ``by`` names no field.

    Examples:
        >>> sort_key = FieldSortKey("json/size/0", missing="last")
        >>> sort_key({"__key__": "a", "json": b'{"size": [640, 480]}'}), sort_key({"__key__": "b", "json": b"{}"})
        ((0, 640), (1, 0))
    """

    def __init__(
        self, by: str, *, numeric: bool = False, missing: WithoutValue = "raise", reverse: bool = False
    ) -> None:
        field, slash, path = by.partition("/")
        self._by_key = by == "key"
        self.field, self.reverse = field.removeprefix(".").lower(), reverse
        if not self.field or (slash and not path) or (field == "__key__"):
            raise ValueError(
                f"samples are sorted by 'key', a field, or a path such as 'json/size/width', not by {by!r}"
            )
        self._path = path.split("/") if path else []
        self._by, self._numeric, self._missing = by, numeric, missing
        self._without = (-1 if (missing == "first") is not reverse else 1, 0)
        self._kind: type | None = None

    def __call__(self, sample: Sample) -> tuple[int, Any]:
        """Return the sort key of a sample.

        Raises:
            MissingFieldError: the sample has no value.
            DecodeError: the value is not JSON or not a number, or cannot be compared with those of other samples.
        """
        value = sample["__key__"] if self._by_key else sample.get(self.field)
        if value is not None and self._path:
            value = self._lookup(sample, value)
        if value is None:
            if self._missing == "raise":
                has = ", ".join(field for field in sample if field[:2] != "__")
                raise MissingFieldError(
                    f"The {_name(sample)} has no {self._by!r} to sort by. It has {has}. "
                    f'To keep it, pass missing="first" or pass missing="last"'
                )
            return self._without
        if isinstance(value, str | bytes) and self._numeric:
            value = self._number(sample, value)
        kind = float if isinstance(value, int | float) else type(value)
        if kind not in _KINDS or (kind is float and math.isnan(value)):
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(value)} has no order"
            )
        if kind is not (self._kind or kind):
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(value)} is {_KINDS[kind]}, but "
                f"earlier samples have {_KINDS[self._kind or kind]}"
            )
        self._kind = kind
        return 0, value

    def _lookup(self, sample: Sample, data: bytes) -> Any:
        """Return the value at the path inside a JSON field, or ``None``."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:  # including UnicodeDecodeError
            raise DecodeError(f"The field {self.field!r} of the {_name(sample)} is not JSON: {error}") from None
        for step in self._path:
            if isinstance(value, list):
                value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def _number(self, sample: Sample, text: str | bytes) -> int | float:
        """Parse text as a number."""
        try:
            words = (text.decode("ascii") if isinstance(text, bytes) else text).strip()
            if not words.isascii() or "_" in words:  # accepted by Python
                raise ValueError
            try:
                return int(words)
            except ValueError:
                number = float(words)
                if math.isnan(number):
                    raise
                return number
        except ValueError:
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(text)} is not a number"
            ) from None


_KINDS = {float: "a number", str: "text", bytes: "text"}


def _name(sample: Sample) -> str:
    url = sample.get("__url__")
    return f"sample {sample['__key__']!r}" + (f" of {redact(url)}" if url else "")


def _describe_key(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
